"""Slots that somebody else writes: held from the start, used when they are written."""

from __future__ import annotations

import pytest

from lora_cache import NoFreeSlotError, Residency, SetTooLargeError, UnknownKeyError
from lora_cache.testing import CacheRig, PlacementError


def write(rig: CacheRig, key: str, slot: int) -> None:
    """Do what the caller of `begin` has to do for one move."""
    rig.placer.contents[slot] = (key, rig.cache.get(key))


def test_a_begun_set_holds_its_slots_and_becomes_ready_with_the_last_write(rig: CacheRig) -> None:
    rig.register("ab")

    lease, moves = rig.cache.begin(["a", "b"])

    assert [(move.key, move.slot) for move in moves] == [("a", 0), ("b", 1)]
    assert rig.placer.placed == []
    assert rig.cache.placing_keys() == dict(lease.slots) == {"a": 0, "b": 1}
    assert rig.cache.residency("a") is Residency.HOST
    for key, slot in (("a", 0), ("b", 1)):
        assert not lease.is_ready
        write(rig, key, slot)
        assert rig.cache.finish(key, slot, seconds=0.5)
        rig.check()
    assert lease.is_ready
    assert rig.cache.slots() == ("a", "b")
    assert rig.cache.stats().device.loads == 2
    assert rig.cache.stats().device.load_s == 1.0


def test_a_set_that_is_in_its_slots_is_ready_at_once(rig: CacheRig) -> None:
    rig.activate("ab")

    lease, moves = rig.cache.begin(["b", "a"])

    assert (lease.is_ready, moves) == (True, ())
    assert rig.cache.leased_keys() == {"a": 1, "b": 1}


def test_a_slot_that_is_being_written_is_nobody_elses(rig: CacheRig) -> None:
    rig.register("abc")
    lease, _ = rig.cache.begin(["a"])
    rig.cache.acquire(["b"])

    assert not rig.cache.can_admit(["c"])
    with pytest.raises(NoFreeSlotError):
        rig.cache.begin(["c"])
    lease.release()
    assert not rig.cache.can_admit(["c"])  # the write goes on
    rig.check()


def test_a_key_that_is_being_written_is_waited_for_and_not_written_twice(rig: CacheRig) -> None:
    rig.register("a")
    first, _ = rig.cache.begin(["a"])

    second, moves = rig.cache.begin(["a"])

    assert moves == ()
    first.release()
    write(rig, "a", 0)
    rig.cache.finish("a", 0)
    assert second.is_ready
    assert not first.is_ready
    assert rig.cache.leased_keys() == {"a": 1}


def test_a_failed_write_frees_the_slot_and_ends_the_leases_that_wait_for_it(rig: CacheRig) -> None:
    rig.register("abc")
    kept = rig.cache.acquire(["b"])
    lease, _ = rig.cache.begin(["a", "b"])
    error = PlacementError("no memory")

    assert rig.cache.fail("a", 1, error)

    assert lease.failure is error
    assert lease.is_released
    assert rig.cache.leased_keys() == {"b": 1}
    assert rig.cache.stats().device.load_failures == 1
    assert rig.cache.can_admit(["c"])
    kept.release()
    rig.check()


def test_a_synchronous_acquire_places_what_is_being_written(rig: CacheRig) -> None:
    rig.register("a")
    pending, _ = rig.cache.begin(["a"])

    with rig.cache.acquire(["a"]) as lease:
        assert lease.slots == pending.slots

    assert pending.is_ready
    assert not rig.cache.finish("a", 0)
    rig.check()


def test_a_synchronous_placement_that_fails_ends_those_who_waited(rig: CacheRig) -> None:
    rig.register("a")
    pending, _ = rig.cache.begin(["a"])
    rig.placer.failing.add("a")

    with pytest.raises(PlacementError):
        rig.cache.activate("a")

    assert isinstance(pending.failure, PlacementError)
    assert rig.cache.placing_keys() == {}
    rig.check()


def test_removing_what_is_being_written_drains_while_it_is_waited_for(rig: CacheRig) -> None:
    rig.register("ab")
    waited, _ = rig.cache.begin(["a"])
    given_up, _ = rig.cache.begin(["b"])
    given_up.release()

    rig.cache.remove("a")
    rig.cache.remove("b")

    assert rig.cache.placing_keys() == {"a": 0}
    assert not rig.cache.finish("b", 1)
    rig.placer.contents[0] = ("a", "value of a")
    assert rig.cache.finish("a", 0)
    assert waited.is_ready
    waited.release()
    assert rig.cache.slots() == (None, None)
    assert rig.placer.cleared == [1, 0]
    rig.check()


def test_what_is_being_written_stays_in_the_host_tier() -> None:
    rig = CacheRig.build(num_slots=1, max_host=2)
    rig.register("a")
    lease, _ = rig.cache.begin(["a"])
    lease.release()

    rig.register("bc")

    assert rig.cache.keys() == ("a", "c")
    rig.check()


def test_a_hook_that_raises_reserves_nothing() -> None:
    rig = CacheRig.build(num_slots=2)
    rig.activate("ab")
    rig.register("cd")

    def refuse(key: str, tier: str) -> None:
        if key == "b":
            raise RuntimeError(f"{key} {tier}")

    rig.cache._transfers._on_evict = refuse
    with pytest.raises(RuntimeError, match="b device"):
        rig.cache.begin(["c", "d"])

    assert rig.cache.placing_keys() == {}
    assert rig.cache.leased_keys() == {}
    rig.check()


@pytest.mark.parametrize(("keys", "error"), [("ax", UnknownKeyError), ("abc", SetTooLargeError)])
def test_a_set_that_cannot_fit_is_refused_and_changes_nothing(
    rig: CacheRig, keys: str, error: type[Exception]
) -> None:
    rig.register("abc")

    with pytest.raises(error):
        rig.cache.begin(list(keys))

    assert rig.cache.placing_keys() == {}
    assert rig.cache.stats().num_leases == 0
