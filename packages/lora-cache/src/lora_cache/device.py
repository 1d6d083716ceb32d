"""The calls that bring keys into slots, hold them there and let them go.

All checks come before the first change. Knows nothing of loading, pins or removal, which the cache
adds, nor of how a slot is written (`transfers`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from lora_cache.errors import (
    CacheError,
    InUseError,
    NoFreeSlotError,
    SetTooLargeError,
    UnknownKeyError,
)
from lora_cache.lease import Lease
from lora_cache.pending import PendingLeases
from lora_cache.transfers import Transfers
from lora_cache.view import CacheView

if TYPE_CHECKING:
    from lora_cache.protocols import Clock, EvictionHook, Placer
    from lora_cache.slots import Move
    from lora_cache.tiers import EvictionPolicy

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class DeviceCalls(CacheView[K, V]):
    """The device half of an `AdapterCache`. Made only as its base."""

    def __init__(
        self,
        *,
        placer: Placer[K, V],
        num_slots: int,
        max_host: int,
        max_host_bytes: int | None,
        policy: EvictionPolicy,
        on_evict: EvictionHook[K] | None,
        clock: Clock,
    ) -> None:
        """Make empty tiers; arguments and errors as `AdapterCache`."""
        super().__init__(
            num_slots=num_slots, max_host=max_host, max_host_bytes=max_host_bytes, policy=policy
        )
        self._pending: PendingLeases[K] = PendingLeases()
        self._transfers = Transfers(
            slots=self._slots,
            host=self._host,
            device_counters=self._device_counters,
            host_counters=self._host_counters,
            placer=placer,
            on_evict=on_evict,
            clock=clock,
        )

    def acquire(self, keys: Collection[K]) -> Lease[K]:
        """Bring the whole set into slots and hold it there; or raise and change nothing.

        No member of the set makes room for another. All members count as used in both tiers.
        When every key is in a slot already this is a few dictionary operations a key.

        Args:
            keys: the set; repeated keys count once, an empty set gives an empty lease.

        Returns:
            A lease; the keys stay in `lease.slots` until it is released.

        Raises:
            UnknownKeyError: keys are not registered; all are named.
            SetTooLargeError: more distinct keys than slots.
            NoFreeSlotError: pinned and leased keys leave too few slots.
            Exception: what the placer or the hook raised. Nothing is leased then; the slot that was
                being written is free, members placed before it stay in theirs.
        """
        wanted = dict.fromkeys(keys)
        slots = self._slots.find(wanted)
        num_hits = len(slots)
        if num_hits < len(wanted) or not self._draining.isdisjoint(wanted):
            self._bring_in(wanted)
            slots = self._slots.find(wanted)
        self._slots.hold(wanted)
        self._host.touch(wanted)
        counters = self._device_counters
        counters.hits += num_hits
        counters.misses += len(wanted) - num_hits
        self._num_leases += 1
        return Lease(slots, self._release)

    def begin(self, keys: Collection[K]) -> tuple[Lease[K], tuple[Move[K], ...]]:
        """Hold the whole set as `acquire` does, but leave the writing of slots to the caller.

        The placer is not called. Until `finish` or `fail` is told about a move, its slot belongs
        to its key and nobody reads it; what is leased elsewhere goes on. A key that another caller
        is having written already is waited for, not written twice.

        Args:
            keys: the set, as for `acquire`.

        Returns:
            A lease, ready when every key is in its slot, and the writes that the caller must do:
            `move.key`'s value into `move.slot`.

        Raises:
            UnknownKeyError, SetTooLargeError, NoFreeSlotError: as `acquire`.
            Exception: what the hook raised; nothing is held then.
        """
        wanted = dict.fromkeys(keys)
        moves = self._moves(wanted)
        reserved = self._slots.reserved
        moves = tuple(move for move in moves if move.key not in reserved)
        self._reserve(moves)
        slots = {key: reserved[key] for key in wanted if key in reserved}
        placing = tuple(slots)
        slots |= self._slots.find(wanted)
        self._slots.hold(wanted)
        self._host.touch(wanted)
        self._device_counters.hits += len(wanted) - len(placing)
        self._device_counters.misses += len(placing)
        self._num_leases += 1
        lease = Lease(slots, self._release, placing=placing)
        self._pending.add(lease, placing)
        return lease, moves

    def finish(self, key: K, slot: int, *, seconds: float = 0.0) -> bool:
        """Take note that the value of `key` is in `slot`, as a move of `begin` asked for.

        Args:
            key: who was written.
            slot: where.
            seconds: what the write took, for the statistics.

        Returns:
            False if that is no longer wanted: the key was removed meanwhile, or placed by another
            call. Nothing changed then.
        """
        if self._slots.reserved.get(key) != slot:
            return False
        self._transfers.note_written(key, seconds, is_placed=True)
        self._pending.placed(key)
        return True

    def fail(self, key: K, slot: int, error: Exception, *, seconds: float = 0.0) -> bool:
        """Take note that `key` could not be written: its slot is free, leases that wait for it end.

        Arguments and result as `finish`; `error` becomes the `failure` of those leases.
        """
        if self._slots.reserved.get(key) != slot:
            return False
        self._transfers.note_written(key, seconds, is_placed=False)
        self._drop_reservation(key, error)
        return True

    def activate(self, key: K) -> bool:
        """Bring `key` into a slot without holding it there; counts as use in both tiers.

        Returns:
            True if it was placed, False if it was in a slot already.

        Raises:
            UnknownKeyError, NoFreeSlotError: as `acquire`; so do errors of placer and hook.
        """
        was_active = key in self._slots
        self._bring_in({key: None})
        self._slots.touch(key)
        self._host.touch([key])
        counters = self._device_counters
        counters.hits += was_active
        counters.misses += not was_active
        return not was_active

    def deactivate(self, key: K) -> bool:
        """Take `key` out of its slot; the host tier keeps it, the slot's data is left as it is.

        Returns:
            Whether it was in a slot.

        Raises:
            InUseError: it is pinned or leased.
        """
        if key not in self._slots:
            return False
        if key in self._slots.leased or self._slots.is_pinned(key):
            raise self._in_use(key)
        self._slots.free(key)
        return True

    # Checks: they decide, `Transfers` acts.

    def _require(self, keys: Iterable[K]) -> None:
        """Raise `UnknownKeyError` with all of `keys` that are not registered."""
        if unknown := [key for key in keys if key not in self]:
            raise self._refusal(UnknownKeyError(unknown))

    def _in_use(self, key: K) -> CacheError:
        return self._refusal(
            InUseError(
                key=key,
                num_leases=self._slots.leased.get(key, 0),
                is_pinned=self._slots.is_pinned(key),
            )
        )

    def _refusal(self, error: CacheError) -> CacheError:
        """Count a refusal and return the error, to be raised."""
        self._refusals += 1
        return error

    def _no_free_slot(self, keys: Iterable[K], *, is_blocked_by_pins: bool) -> CacheError:
        return self._refusal(
            NoFreeSlotError(
                keys=keys,
                num_slots=self._slots.num_slots,
                pinned=self._slots.pinned,
                leased=self._slots.leased,
                is_blocked_by_pins=is_blocked_by_pins,
            )
        )

    def _moves(self, wanted: Mapping[K, None]) -> tuple[Move[K], ...]:
        """Say how the absent members of the set get their slots, all checks first."""
        self._require(wanted)
        num_slots = self._slots.num_slots
        if len(wanted) > num_slots:
            raise self._refusal(SetTooLargeError(num_keys=len(wanted), num_slots=num_slots))
        moves = self._plan(wanted)
        if moves is None:
            absent = [key for key in wanted if key not in self._slots]
            blocked = not self.fits_beside_pins(wanted)
            raise self._no_free_slot(absent, is_blocked_by_pins=blocked)
        return moves

    def _bring_in(self, wanted: Mapping[K, None]) -> None:
        """Place the absent members of the set, those included that are being written elsewhere."""
        for move in self._moves(wanted):
            try:
                self._transfers.place(move)
            except Exception as error:
                self._drop_reservation(move.key, error)
                raise
            self._pending.placed(move.key)

    def _reserve(self, moves: Iterable[Move[K]]) -> None:
        """Reserve the slots of all moves, or of none."""
        done: list[K] = []
        try:
            for move in moves:
                self._transfers.reserve(move)
                done.append(move.key)
        except BaseException:
            for key in done:
                self._slots.free(key)
            raise

    def _drop_reservation(self, key: K, error: Exception) -> None:
        """End the leases that wait for `key` and free the slot that it has reserved, if any."""
        self._pending.failed(key, error)
        if key in self._slots.reserved:
            self._slots.free(key)

    def _release(self, slots: Mapping[K, int]) -> None:
        """End one lease; what was only waiting for it is freed."""
        self._num_leases -= 1
        self._slots.let_go(slots)
        if self._draining:
            leased = self._slots.leased
            drained = [key for key in slots if key in self._draining and key not in leased]
            self._draining.difference_update(drained)
            self._transfers.free(drained)
