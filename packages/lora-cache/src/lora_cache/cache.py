"""The cache over both tiers: who may come in, who must stay, and who goes.

Decides, and refuses before anything has changed. Knows nothing of what a value is, nor how entries
are carried between the tiers (`transfers`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from lora_cache.errors import (
    CacheError,
    InUseError,
    NoFreeSlotError,
    NoPinsError,
    RemovingError,
    SetTooLargeError,
    UnknownKeyError,
)
from lora_cache.lease import Lease
from lora_cache.tiers import EvictionPolicy
from lora_cache.transfers import Transfers
from lora_cache.view import CacheView

if TYPE_CHECKING:
    from lora_cache.protocols import Clock, EvictionHook, Loader, Placer

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class AdapterCache(CacheView[K, V]):
    """A host tier of values and a table of device slots above it, kept consistent.

    At any moment: what is in a slot is in the host tier too; no key is in two slots; pinned and
    leased keys are in their slots; the counts and bytes are within their limits. A call that raises
    one of this package's errors has changed nothing but counters. Errors of the placer and of the
    hook pass through and leave the cache consistent.

    One thread owns it and makes all calls. Keys should be digests of content: then equal content
    under two names takes one entry and one slot.
    """

    def __init__(
        self,
        *,
        placer: Placer[K, V],
        num_slots: int,
        max_host: int,
        max_host_bytes: int | None = None,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        on_evict: EvictionHook[K] | None = None,
        allow_pin_all: bool = False,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Make an empty cache.

        Args:
            placer: writes values into slots.
            num_slots: device slots; the largest number of distinct keys in one acquired set.
            max_host: entries of the host tier, at least `num_slots`.
            max_host_bytes: bytes of the host tier; None for no limit.
            policy: what full tiers do.
            on_evict: is told of evictions.
            allow_pin_all: whether the last unpinned slot may be pinned too. Other keys can never
                run then.
            clock: seconds, for the times in `stats`.

        Raises:
            ValueError: a number is out of range; the message lists all that are.
        """
        super().__init__(
            num_slots=num_slots, max_host=max_host, max_host_bytes=max_host_bytes, policy=policy
        )
        self._allow_pin_all = allow_pin_all
        self._transfers = Transfers(
            slots=self._slots,
            host=self._host,
            device_counters=self._device_counters,
            host_counters=self._host_counters,
            placer=placer,
            on_evict=on_evict,
            clock=clock,
        )

    # Host tier.

    def register(self, key: K, value: V, *, size_bytes: int) -> bool:
        """Put `value` into the host tier; takes no slot.

        Args:
            key: who it is.
            value: what the placer will get.
            size_bytes: what it costs of the byte budget.

        Returns:
            True if it was added. False if the key is known: its value stays, it counts as used.

        Raises:
            HostTierFullError: there is no room beside what must stay.
            RemovingError: an entry of that key is still draining; see `restore`.
            ValueError: `size_bytes` is negative.
        """
        self._refuse_draining(key)
        if key in self._host:
            self._host_counters.hits += 1
            self._host.touch([key])
            return False
        self._add(key, value, size_bytes)
        self._host_counters.misses += 1
        return True

    def touch(self, keys: Collection[K]) -> None:
        """Count registered keys as used in the host tier, so that others are evicted first.

        Args:
            keys: unknown ones are passed over.
        """
        self._host.touch([key for key in keys if key in self])

    def load(self, key: K, loader: Loader[K, V]) -> V:
        """Return the value of `key`, calling `loader` first if it is not registered.

        Room is made after the load: a load that fails evicts nothing.

        Raises:
            LoadFailedError: `loader` raised; its error is the cause.
            HostTierFullError, RemovingError: as `register`.
        """
        self._refuse_draining(key)
        if key in self._host:
            self._host_counters.hits += 1
            self._host.touch([key])
            return self._host.get(key)
        loaded = self._transfers.load(key, loader)
        self.register(key, loaded.value, size_bytes=loaded.size_bytes)
        return loaded.value

    def reload(self, key: K, loader: Loader[K, V]) -> V:
        """Replace the value of `key` by what `loader` returns; an unknown key is just loaded.

        First the load, then the old version goes, then whoever must make room, then the new one
        comes in. Until then the old version stays, so a failed load changes nothing. The slot is
        given up; a pinned key is placed again at once and stays pinned, unless its place fails.

        Raises:
            InUseError: leases hold the old version.
            LoadFailedError: `loader` raised; its error is the cause.
            HostTierFullError, RemovingError: as `register`.
        """
        self._refuse_draining(key)
        if key in self._slots.leased:
            raise self._in_use(key)
        loaded = self._transfers.load(key, loader)
        was_pinned = self.is_pinned(key)
        self._add(key, loaded.value, loaded.size_bytes)
        self._host_counters.misses += 1
        if was_pinned:
            self.pin(key)
        return loaded.value

    # Device tier.

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

    # Pins and removal.

    def pin(self, key: K) -> None:
        """Keep `key` in both tiers until `unpin` or `remove`, placing it if need be.

        Raises:
            NoPinsError: the policy is strict.
            UnknownKeyError: `key` is not registered.
            NoFreeSlotError: it would take the last unpinned slot and `allow_pin_all` is off, or
                every slot is pinned, or leases leave no slot for it now.
        """
        self._check_pins_exist(key)
        self._require([key])
        if self._slots.is_pinned(key):
            return
        num_pins = len(self._slots.pinned) + 1
        limit = self._slots.num_slots - (0 if self._allow_pin_all else 1)
        if num_pins > limit:
            raise self._no_free_slot([key], is_blocked_by_pins=True)
        self.activate(key)
        self._slots.pin(key)
        self._host.pin(key)

    def unpin(self, key: K) -> None:
        """Let `key` be evicted again; a key that is not pinned stays as it is.

        Raises:
            NoPinsError: the policy is strict.
            UnknownKeyError: `key` is not registered.
        """
        self._check_pins_exist(key)
        self._require([key])
        self._transfers.unpin(key)

    def remove(self, key: K) -> bool:
        """Take `key` away: unpinned and unknown at once, freed when its last lease ends.

        Returns:
            False if it is not registered (a draining key is not).

        Raises:
            Exception: what `Placer.clear` raised; the entry is gone all the same.
        """
        if key not in self:
            return False
        self._drop([key])
        return True

    def restore(self, key: K) -> bool:
        """Take back a `remove` that still drains: same value, slot and leases, but no pin.

        Returns:
            Whether it was draining; if not, nothing changed.
        """
        if key not in self._draining:
            return False
        self._draining.discard(key)
        return True

    def clear(self) -> None:
        """Remove every key. Leased ones drain, as with `remove`.

        Raises:
            Exception: what `Placer.clear` raised; the entries are gone all the same.
        """
        self._num_clears += 1
        self._drop(self.keys())

    # Checks: they decide, `Transfers` acts.

    def _require(self, keys: Iterable[K]) -> None:
        """Raise `UnknownKeyError` with all of `keys` that are not registered."""
        if unknown := [key for key in keys if key not in self]:
            raise self._refusal(UnknownKeyError(unknown))

    def _check_pins_exist(self, key: K) -> None:
        if self._policy is EvictionPolicy.STRICT:
            raise self._refusal(NoPinsError(key))

    def _refuse_draining(self, key: K) -> None:
        if key in self._draining:
            raise self._refusal(RemovingError(key=key, num_leases=self._slots.leased[key]))

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

    def _bring_in(self, wanted: Mapping[K, None]) -> None:
        """Place the absent members of the set, all checks first."""
        self._require(wanted)
        num_slots = self._slots.num_slots
        if len(wanted) > num_slots:
            raise self._refusal(SetTooLargeError(num_keys=len(wanted), num_slots=num_slots))
        moves = self._plan(wanted)
        if moves is None:
            absent = [key for key in wanted if key not in self._slots]
            blocked = not self.fits_beside_pins(wanted)
            raise self._no_free_slot(absent, is_blocked_by_pins=blocked)
        for move in moves:
            self._transfers.place(move)

    def _add(self, key: K, value: V, size_bytes: int) -> None:
        """Put an entry into the host tier, room permitting, in place of an old version of it."""
        try:
            victims = self._host.plan_room(key, size_bytes=size_bytes, keep=self._slots.leased)
        except CacheError as error:
            raise self._refusal(error) from None
        self._transfers.add(key, value, size_bytes=size_bytes, victims=victims)

    def _drop(self, keys: Iterable[K]) -> None:
        """Unpin `keys`; mark the leased ones as draining, free the others."""
        idle = []
        for key in keys:
            self._transfers.unpin(key)
            if key in self._slots.leased:
                self._draining.add(key)
            else:
                idle.append(key)
        self._transfers.free(idle)

    def _release(self, slots: Mapping[K, int]) -> None:
        """End one lease; what was only waiting for it is freed."""
        self._num_leases -= 1
        self._slots.let_go(slots)
        if self._draining:
            leased = self._slots.leased
            drained = [key for key in slots if key in self._draining and key not in leased]
            self._draining.difference_update(drained)
            self._transfers.free(drained)
