"""The cache over both tiers: who may come in, who must stay, and who goes.

Decides, and refuses before anything has changed. Knows nothing of what a value is, nor how entries
are carried between the tiers (`transfers`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterable
from typing import TYPE_CHECKING, TypeVar

from lora_cache.device import DeviceCalls
from lora_cache.errors import CacheError, NoPinsError, RemovingError
from lora_cache.tiers import EvictionPolicy

if TYPE_CHECKING:
    from lora_cache.protocols import Clock, EvictionHook, Loader, Placer

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class AdapterCache(DeviceCalls[K, V]):
    """A host tier of values and a table of device slots above it, kept consistent.

    At any moment: what is in a slot is in the host tier too; no key is in two slots; pinned keys
    are in their slots, leased ones too or on their way there (`begin`); the counts and bytes are
    within their limits. A call that raises one of this package's errors has changed nothing but
    counters. Errors of the placer and of the hook pass through and leave the cache consistent.

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
            placer=placer,
            num_slots=num_slots,
            max_host=max_host,
            max_host_bytes=max_host_bytes,
            policy=policy,
            on_evict=on_evict,
            clock=clock,
        )
        self._allow_pin_all = allow_pin_all

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

    # Checks and steps of the calls above.

    def _check_pins_exist(self, key: K) -> None:
        if self._policy is EvictionPolicy.STRICT:
            raise self._refusal(NoPinsError(key))

    def _refuse_draining(self, key: K) -> None:
        if key in self._draining:
            raise self._refusal(RemovingError(key=key, num_leases=self._slots.leased[key]))

    def _add(self, key: K, value: V, size_bytes: int) -> None:
        """Put an entry into the host tier, room permitting, in place of an old version of it."""
        try:
            keep = self._slots.leased.keys() | self._slots.reserved.keys()
            victims = self._host.plan_room(key, size_bytes=size_bytes, keep=keep)
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
