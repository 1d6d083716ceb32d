"""Counters: what is counted where, and that a snapshot stays as it was."""

from __future__ import annotations

import dataclasses

import pytest

from lora_cache import Loaded, NoFreeSlotError, TierStats, UnknownKeyError
from lora_cache.stats import TierCounters
from lora_cache.testing import CacheRig, PlacementError


def test_a_snapshot_is_frozen_and_does_not_follow_the_cache(rig: CacheRig) -> None:
    stats = rig.cache.stats()

    rig.activate("a")

    assert stats.slots_used == 0
    assert stats.device.loads == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.slots_used = 1  # type: ignore[misc]


def test_hits_and_misses_count_keys_per_tier(rig: CacheRig) -> None:
    rig.register("ab")
    rig.register("a")
    rig.cache.acquire(["a"]).release()
    rig.cache.acquire(["a", "b"]).release()
    rig.cache.activate("b")

    stats = rig.cache.stats()

    assert (stats.host.hits, stats.host.misses, stats.host.loads) == (1, 2, 2)
    assert (stats.device.hits, stats.device.misses, stats.device.loads) == (2, 2, 2)


def test_evictions_count_per_tier_and_removals_do_not() -> None:
    rig = CacheRig.build(num_slots=1, max_host=2)
    rig.activate("ab")  # a leaves its slot
    rig.activate("c")  # a leaves the host tier, b its slot
    rig.cache.remove("c")
    rig.cache.clear()

    stats = rig.cache.stats()

    assert stats.device.evictions == 2
    assert stats.host.evictions == 1


def test_seconds_are_those_of_the_given_clock(rig: CacheRig) -> None:
    rig.placer.place_s = 0.25

    def load(key: str) -> Loaded[str]:
        rig.clock.advance(2.0)
        return Loaded(value=key, size_bytes=1)

    rig.cache.load("a", load)
    rig.cache.load("b", load)
    rig.cache.activate("a")
    rig.placer.failing.add("b")
    with pytest.raises(PlacementError):
        rig.cache.activate("b")
    stats = rig.cache.stats()

    assert stats.host.load_s == 4.0
    assert stats.device.load_s == 0.5
    assert (stats.device.loads, stats.device.load_failures) == (1, 1)


def test_state_is_counted_by_slot_lease_and_byte() -> None:
    rig = CacheRig.build(num_slots=4, max_host=5, max_host_bytes=100)
    rig.register("abcd", size_bytes=7)
    rig.cache.pin("a")
    first = rig.cache.acquire(["a", "b"])
    second = rig.cache.acquire(["b"])
    rig.cache.remove("b")

    stats = rig.cache.stats()

    assert (stats.num_slots, stats.slots_used, stats.slots_pinned) == (4, 2, 1)
    assert (stats.slots_leased, stats.slots_draining, stats.num_leases) == (2, 1, 2)
    assert (stats.host_entries, stats.max_host) == (4, 5)
    assert (stats.host_bytes, stats.max_host_bytes, stats.device_bytes) == (28, 100, 14)
    assert stats.layout_version == rig.cache.layout_version
    first.release()
    second.release()


def test_refusals_are_counted(rig: CacheRig) -> None:
    rig.register("ab")
    rig.cache.pin("a")

    with pytest.raises(UnknownKeyError):
        rig.cache.acquire(["x"])
    with pytest.raises(NoFreeSlotError):
        rig.cache.pin("b")

    assert rig.cache.stats().refusals == 2


def test_questions_are_not_counted(rig: CacheRig) -> None:
    """No question has an effect, on counters or on the order of use."""
    rig.activate("ab")
    before = (rig.cache.stats(), rig.cache.keys(), rig.cache.active_keys())

    rig.cache.can_admit(["a", "x"])
    rig.cache.fits_beside_pins(["a", "x"])
    rig.cache.get("a")
    rig.cache.residency("a")
    rig.cache.slot_of("a")
    with pytest.raises(UnknownKeyError):
        rig.cache.get("x")

    assert (rig.cache.stats(), rig.cache.keys(), rig.cache.active_keys()) == before


def test_counters_and_their_snapshot_have_the_same_fields() -> None:
    counters = {field.name for field in dataclasses.fields(TierCounters)}
    snapshot = {field.name for field in dataclasses.fields(TierStats)}

    assert counters == snapshot
    assert TierCounters(hits=3, load_s=0.5).snapshot() == TierStats(
        hits=3, misses=0, evictions=0, loads=0, load_s=0.5, load_failures=0
    )
