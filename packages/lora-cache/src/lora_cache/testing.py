"""Fakes for tests of code that uses a cache, and the check that its books are in order.

Knows nothing of any test framework.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from lora_cache.cache import AdapterCache
from lora_cache.tiers import EvictionPolicy, Residency, Tier

if TYPE_CHECKING:
    from lora_cache.protocols import Loaded

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True, kw_only=True)
class ManualClock:
    """A clock that stands still until it is told to advance."""

    now_s: float = 0.0
    """What a call returns, in seconds."""

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds


class PlacementError(Exception):
    """What a `RecordingPlacer` raises when it was told to fail."""


@dataclass(slots=True, kw_only=True)
class RecordingPlacer(Generic[K, V]):
    """A placer that models the device: it remembers every call and what each slot holds.

    As on a real device, the data of a slot stays until it is written over or cleared, and a failed
    write leaves neither the old nor the new data.
    """

    contents: dict[int, tuple[K, V]] = field(default_factory=dict)
    """What was written into each slot last; a cleared or half-written slot is absent."""
    placed: list[tuple[K, int]] = field(default_factory=list)
    """Every attempt to place, failed ones included: key and slot, oldest first."""
    cleared: list[int] = field(default_factory=list)
    """Every cleared slot, oldest first."""
    failing: set[K] = field(default_factory=set)
    """Keys whose placement raises `PlacementError`."""
    clock: ManualClock | None = None
    """Advanced by `place_s` with each attempt."""
    place_s: float = 0.0
    """Seconds an attempt takes."""

    def place(self, key: K, value: V, slot: int) -> None:
        """Write `value` into `slot`, or raise if `key` is among `failing`."""
        self.placed.append((key, slot))
        if self.clock is not None:
            self.clock.advance(self.place_s)
        self.contents.pop(slot, None)
        if key in self.failing:
            raise PlacementError(f"told to fail for {key!r}")
        self.contents[slot] = (key, value)

    def clear(self, slot: int) -> None:
        """Empty `slot`."""
        self.cleared.append(slot)
        self.contents.pop(slot, None)


@dataclass(slots=True, kw_only=True)
class RecordingHook(Generic[K]):
    """An eviction hook that remembers what it was told."""

    evicted: list[tuple[K, Tier]] = field(default_factory=list)
    """Key and the tier it left, oldest first."""

    def __call__(self, key: K, tier: Tier) -> None:
        """Take note."""
        self.evicted.append((key, tier))


@dataclass(slots=True, kw_only=True)
class RecordingLoader(Generic[K, V]):
    """A loader over a mapping of what is stored; remembers what was asked of it."""

    stored: dict[K, Loaded[V]] = field(default_factory=dict)
    """What can be loaded; any other key raises `FileNotFoundError`."""
    asked: list[K] = field(default_factory=list)
    """Every key asked for, oldest first."""

    def __call__(self, key: K) -> Loaded[V]:
        """Return what is stored for `key`."""
        self.asked.append(key)
        if key not in self.stored:
            raise FileNotFoundError(f"nothing stored for {key!r}")
        return self.stored[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRig:
    """A cache of strings with recording parts around it; each key is one letter."""

    cache: AdapterCache[str, str]
    """The cache under test."""
    placer: RecordingPlacer[str, str]
    """Its device."""
    hook: RecordingHook[str]
    """Its eviction hook."""
    clock: ManualClock
    """The clock of cache and placer."""

    @classmethod
    def build(
        cls,
        *,
        num_slots: int = 2,
        max_host: int = 4,
        max_host_bytes: int | None = None,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        allow_pin_all: bool = False,
    ) -> Self:
        """Return a rig around an empty cache; arguments as `AdapterCache`."""
        clock = ManualClock()
        placer: RecordingPlacer[str, str] = RecordingPlacer(clock=clock)
        hook: RecordingHook[str] = RecordingHook()
        cache: AdapterCache[str, str] = AdapterCache(
            placer=placer,
            num_slots=num_slots,
            max_host=max_host,
            max_host_bytes=max_host_bytes,
            policy=policy,
            on_evict=hook,
            allow_pin_all=allow_pin_all,
            clock=clock,
        )
        return cls(cache=cache, placer=placer, hook=hook, clock=clock)

    def register(self, keys: str, *, size_bytes: int = 1) -> None:
        """Register each letter of `keys` with a value that names it."""
        for key in keys:
            self.cache.register(key, f"value of {key}", size_bytes=size_bytes)

    def activate(self, keys: str) -> None:
        """Register and activate each letter of `keys`."""
        for key in keys:
            self.register(key)
            self.cache.activate(key)

    def check(self) -> None:
        """Assert that the books are in order and each slot holds what it should."""
        check_consistency(self.cache)
        check_device(self.cache, self.placer)


def check_consistency(cache: AdapterCache[K, V]) -> None:
    """Assert all that must hold of a cache between any two calls.

    Raises:
        AssertionError: naming the rule that is broken.
    """
    _check_slots(cache)
    _check_limits(cache)
    _check_holds(cache)


def check_device(cache: AdapterCache[K, V], placer: RecordingPlacer[K, V]) -> None:
    """Assert that each key in a slot finds its own registered value there.

    Raises:
        AssertionError: naming the key and what its slot holds.
    """
    for key in cache.active_keys():
        slot = cache.slot_of(key)
        assert slot is not None, f"{key!r} is active and has no slot"
        held = placer.contents.get(slot)
        assert held is not None, f"{key!r} sits in slot {slot}, which holds nothing"
        assert held[0] == key, f"{key!r} sits in slot {slot}, which holds {held[0]!r}"
        if key in cache:
            assert held[1] is cache.get(key), f"slot {slot} holds another value of {key!r}"


def _check_slots(cache: AdapterCache[K, V]) -> None:
    """No key twice, every way to ask agrees, and the device is a subset of the host."""
    held = [key for key in cache.slots() if key is not None]
    assert len(held) == len(set(held)), f"a key sits in two slots: {cache.slots()!r}"
    for key in cache.active_keys():
        slot = cache.slot_of(key)
        assert slot is not None, f"{key!r} is active and has no slot"
        assert cache.slots()[slot] == key, f"{key!r} is not where it says: {cache.slots()!r}"
    assert len(held) == len(cache.active_keys()), "a key in a slot is not active"
    placing = cache.placing_keys()
    assert placing.keys().isdisjoint(held), f"placing and placed: {placing.keys() & set(held)!r}"
    assert len(set(placing.values())) == len(placing), f"one slot for two keys: {placing!r}"
    assert all(cache.slots()[slot] is None for slot in placing.values()), "a slot is held twice"
    held += placing
    known = set(cache.keys()) | cache.draining_keys()
    assert set(held) <= known, f"in a slot, not in the host tier: {set(held) - known!r}"


def _check_limits(cache: AdapterCache[K, V]) -> None:
    """Counts and bytes are within their limits and agree with each other."""
    stats = cache.stats()
    assert stats.slots_used == len(cache.active_keys()), "used slots do not add up"
    assert stats.slots_placing == len(cache.placing_keys()), "slots being written do not add up"
    assert stats.slots_used + stats.slots_placing <= stats.num_slots, "too many slots in use"
    assert stats.host_entries == len(cache) + stats.slots_draining, "host entries do not add up"
    assert stats.host_entries <= stats.max_host, "too many host entries"
    assert stats.device_bytes <= stats.host_bytes, "the device holds more than the host tier"
    if stats.max_host_bytes is not None:
        assert stats.host_bytes <= stats.max_host_bytes, "the host tier is over its byte budget"


def _check_holds(cache: AdapterCache[K, V]) -> None:
    """What is pinned or leased is resident; what drains is leased and unknown."""
    _check_resident(cache, cache.pinned_keys(), "pinned")
    placing = cache.placing_keys()
    _check_resident(cache, cache.leased_keys().keys() - placing.keys(), "leased")
    assert all(key in cache for key in cache.pinned_keys()), "a pinned key is not registered"
    assert all(count > 0 for count in cache.leased_keys().values()), "a lease count is not positive"
    for key in cache.draining_keys():
        assert key in cache.leased_keys(), f"{key!r} drains and nobody holds it"
        assert key not in cache, f"{key!r} drains and is still known"


def _check_resident(cache: AdapterCache[K, V], keys: Iterable[K], why: str) -> None:
    """Assert that `keys` are in slots."""
    for key in keys:
        assert cache.residency(key) is Residency.DEVICE, f"{key!r} is {why} and in no slot"
