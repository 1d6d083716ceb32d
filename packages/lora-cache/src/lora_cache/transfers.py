"""Carries entries between the tiers, with the placer, the hook and the clock.

Acts, in an order that leaves both tiers consistent wherever an error of the caller's code cuts in.
Decides nothing: who moves is settled before it is called.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

from lora_cache.errors import LoadFailedError
from lora_cache.tiers import Tier

if TYPE_CHECKING:
    from lora_cache.host import HostTier
    from lora_cache.protocols import Clock, EvictionHook, Loaded, Loader, Placer
    from lora_cache.slots import Move, SlotTable
    from lora_cache.stats import TierCounters

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Transfers(Generic[K, V]):
    """The only writer of both tiers' contents; counts what it does. Internal to the package."""

    def __init__(
        self,
        *,
        slots: SlotTable[K],
        host: HostTier[K, V],
        device_counters: TierCounters,
        host_counters: TierCounters,
        placer: Placer[K, V],
        on_evict: EvictionHook[K] | None,
        clock: Clock,
    ) -> None:
        """Work on tiers and counters that the caller shares."""
        self._slots = slots
        self._host = host
        self._device_counters = device_counters
        self._host_counters = host_counters
        self._placer = placer
        self._on_evict = on_evict
        self._clock = clock

    def load(self, key: K, loader: Loader[K, V]) -> Loaded[V]:
        """Call the loader; changes no tier.

        Raises:
            LoadFailedError: whatever the loader raised, as its cause.
        """
        start_s = self._clock()
        try:
            return loader(key)
        except Exception as error:  # the loader is the caller's: anything may come out of it
            self._host_counters.load_failures += 1
            raise LoadFailedError(key=key, reason=str(error) or type(error).__name__) from error
        finally:
            self._host_counters.load_s += self._clock() - start_s

    def reserve(self, move: Move[K]) -> None:
        """Evict the victim and keep its slot for the key, which is written there from now on."""
        if move.victim is not None:
            self._evict_from_slot(move.victim)
        self._slots.reserve(move.key, move.slot)

    def note_written(self, key: K, seconds: float, *, is_placed: bool) -> None:
        """Count a write that the owner did by itself, and give the slot to the key."""
        counters = self._device_counters
        counters.load_s += seconds
        counters.loads += is_placed
        counters.load_failures += not is_placed
        if is_placed:
            self._slots.assign(key, self._slots.reserved[key])

    def place(self, move: Move[K]) -> None:
        """Evict the victim, write the slot, and only then give it to the key."""
        if move.victim is not None:
            self._evict_from_slot(move.victim)
        value = self._host.get(move.key)
        counters = self._device_counters
        start_s = self._clock()
        is_placed = False
        try:
            self._placer.place(move.key, value, move.slot)
            is_placed = True
        finally:
            counters.load_s += self._clock() - start_s
            counters.loads += is_placed
            counters.load_failures += not is_placed
        self._slots.assign(move.key, move.slot)

    def add(self, key: K, value: V, *, size_bytes: int, victims: Iterable[K]) -> None:
        """Put an entry into the host tier: an old version goes, then the victims, then it comes."""
        if key in self._host:
            self.unpin(key)
            if self._slots.has_place(key):
                self._slots.free(key)
            self._host.remove(key)
        for victim in victims:
            if victim in self._slots:
                self._evict_from_slot(victim)
            self._host.remove(victim)
            self._host_counters.evictions += 1
            self._tell(victim, Tier.HOST)
        self._host.add(key, value, size_bytes=size_bytes)
        self._host_counters.loads += 1

    def unpin(self, key: K) -> None:
        """Unpin `key` in both tiers."""
        self._slots.unpin(key)
        self._host.unpin(key)

    def free(self, keys: Iterable[K]) -> None:
        """Take keys nobody holds out of both tiers, then have their slots cleared."""
        freed = []
        for key in keys:
            if self._slots.has_place(key):
                freed.append(self._slots.free(key))
            self._host.remove(key)
        for slot in freed:
            self._placer.clear(slot)

    def _evict_from_slot(self, key: K) -> None:
        self._slots.free(key)
        self._device_counters.evictions += 1
        self._tell(key, Tier.DEVICE)

    def _tell(self, key: K, tier: Tier) -> None:
        if self._on_evict is not None:
            self._on_evict(key, tier)
