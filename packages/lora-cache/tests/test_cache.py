"""The cache's two main verbs, register and acquire, under both policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lora_cache import (
    AdapterCache,
    EvictionPolicy,
    HostTierFullError,
    InUseError,
    NoFreeSlotError,
    SetTooLargeError,
    Tier,
    UnknownKeyError,
)
from lora_cache.testing import CacheRig, PlacementError

if TYPE_CHECKING:
    from collections.abc import Callable


def test_activation_takes_the_lowest_free_slot() -> None:
    """C1."""
    rig = CacheRig.build(num_slots=3)
    rig.activate("abc")
    rig.cache.deactivate("b")
    rig.cache.deactivate("a")

    rig.register("d")
    rig.cache.activate("d")

    assert rig.cache.slots() == ("d", None, "c")
    rig.check()


def test_registering_a_known_key_returns_false_and_keeps_its_value(rig: CacheRig) -> None:
    """C2, C16: equal content under two names is one key, one entry."""
    assert rig.cache.register("a", "first", size_bytes=1)

    assert not rig.cache.register("a", "second", size_bytes=99)

    assert rig.cache.get("a") == "first"
    assert rig.cache.stats().host_bytes == 1
    assert len(rig.cache) == 1


def test_equal_content_takes_one_slot_however_often_it_is_acquired(rig: CacheRig) -> None:
    """C16."""
    rig.register("a")
    rig.register("a")

    with rig.cache.acquire(["a", "a"]) as first, rig.cache.acquire(["a"]) as second:
        assert first.slots == second.slots == {"a": 0}
        assert rig.cache.slots() == ("a", None)


def test_the_strict_policy_raises_when_the_host_tier_is_full() -> None:
    """C3."""
    rig = CacheRig.build(policy=EvictionPolicy.STRICT, num_slots=1, max_host=2)
    rig.register("ab")

    with pytest.raises(HostTierFullError, match="no free adapter slots"):
        rig.cache.register("c", "three", size_bytes=1)

    assert rig.cache.keys() == ("a", "b")
    assert rig.cache.stats().refusals == 1


def test_the_strict_policy_raises_when_no_slot_is_free() -> None:
    """C3."""
    rig = CacheRig.build(policy=EvictionPolicy.STRICT, num_slots=1)
    rig.activate("a")
    rig.register("b")

    with pytest.raises(NoFreeSlotError, match="no free adapter slots for 'b'") as caught:
        rig.cache.activate("b")
    assert not rig.cache.can_admit(["b"])
    assert not caught.value.is_blocked_by_pins

    rig.cache.deactivate("a")
    assert rig.cache.activate("b")
    assert rig.hook.evicted == []


def test_the_lru_policy_evicts_the_oldest_registered_entry() -> None:
    """C3, C17: add 1 and 2, use 1, add 3 with two places: 2 goes."""
    rig = CacheRig.build(num_slots=1, max_host=2)
    rig.register("12")
    rig.cache.activate("1")

    rig.register("3")

    assert rig.cache.keys() == ("1", "3")
    assert rig.hook.evicted == [("2", Tier.HOST)]


def test_activating_an_active_key_returns_false_and_refreshes_it(rig: CacheRig) -> None:
    """C4."""
    rig.activate("ab")

    assert not rig.cache.activate("a")

    assert rig.cache.active_keys() == ("b", "a")
    assert rig.cache.keys() == ("b", "a")
    assert len(rig.placer.placed) == 2


def test_activating_evicts_the_least_recently_used_active_key(rig: CacheRig) -> None:
    """C4."""
    rig.activate("ab")
    rig.cache.activate("a")
    rig.register("c")

    assert rig.cache.activate("c")

    assert rig.cache.slots() == ("a", "c")
    assert rig.hook.evicted == [("b", Tier.DEVICE)]
    assert "b" in rig.cache
    rig.check()


@pytest.mark.parametrize("use", ["acquire", "activate", "pin"])
def test_use_refreshes_both_tiers(rig: CacheRig, use: str) -> None:
    """C4."""
    rig.activate("ab")

    getattr(rig.cache, use)("a")

    assert rig.cache.active_keys() == ("b", "a")
    assert rig.cache.keys() == ("b", "a")


def test_deactivating_leaves_the_data_in_the_slot(rig: CacheRig) -> None:
    """C5."""
    rig.activate("a")

    assert rig.cache.deactivate("a")
    assert not rig.cache.deactivate("a")

    assert rig.cache.slots() == (None, None)
    assert "a" in rig.cache
    assert rig.placer.cleared == []
    assert rig.placer.contents[0] == ("a", "value of a")


def test_leaving_the_host_tier_deactivates_as_well() -> None:
    """C5."""
    rig = CacheRig.build(num_slots=2, max_host=2)
    rig.activate("ab")

    rig.register("c")

    assert rig.cache.slots() == (None, "b")
    assert rig.hook.evicted == [("a", Tier.DEVICE), ("a", Tier.HOST)]
    rig.check()


def test_more_distinct_keys_than_slots_is_an_error_with_both_numbers(rig: CacheRig) -> None:
    """C6."""
    rig.register("abc")

    with pytest.raises(SetTooLargeError) as caught:
        rig.cache.acquire(["a", "b", "c"])

    assert (caught.value.num_keys, caught.value.num_slots) == (3, 2)
    assert not rig.cache.can_admit(["a", "b", "c"])


def test_repeated_keys_of_a_set_count_once(rig: CacheRig) -> None:
    rig.register("ab")

    with rig.cache.acquire(["a", "b", "a", "b", "a"]) as lease:
        assert lease.slots == {"a": 0, "b": 1}
        assert rig.cache.leased_keys() == {"a": 1, "b": 1}


@pytest.mark.parametrize("order", ["ca", "ac"])
def test_acquire_never_evicts_a_member_of_its_own_set(rig: CacheRig, order: str) -> None:
    """C7: active {A, B}, acquire {C, A} evicts B, whichever comes first."""
    rig.activate("ab")
    rig.register("c")
    rig.placer.placed.clear()

    with rig.cache.acquire(order) as lease:
        assert lease.slots == {"a": 0, "c": 1}

    assert rig.placer.placed == [("c", 1)]
    assert rig.hook.evicted == [("b", Tier.DEVICE)]


def test_pins_and_leases_count_in_admission() -> None:
    """C8: two slots, one pinned idle key: a set of two others does not fit."""
    rig = CacheRig.build(num_slots=2)
    rig.register("abc")
    rig.cache.pin("a")

    assert rig.cache.can_admit(["b"])
    assert rig.cache.can_admit(["a", "b"])
    assert not rig.cache.can_admit(["b", "c"])
    with pytest.raises(NoFreeSlotError):
        rig.cache.acquire(["b", "c"])
    with rig.cache.acquire(["b"]):
        assert rig.cache.can_admit(["a", "b"])
        assert not rig.cache.can_admit(["c"])
    assert rig.cache.can_admit(["c"])


def test_an_unknown_key_is_not_admitted_and_all_are_named(rig: CacheRig) -> None:
    rig.register("a")

    assert not rig.cache.can_admit(["a", "x"])
    with pytest.raises(UnknownKeyError) as caught:
        rig.cache.acquire(["x", "a", "y"])

    assert caught.value.keys == ("x", "y")


def test_an_empty_set_is_always_admitted_and_holds_nothing(rig: CacheRig) -> None:
    assert rig.cache.can_admit([])

    with rig.cache.acquire([]) as lease:
        assert lease.slots == {}


def test_a_leased_key_is_neither_evicted_nor_deactivated() -> None:
    """C11."""
    rig = CacheRig.build(num_slots=1, max_host=1)
    rig.register("a")

    with rig.cache.acquire(["a"]):
        with pytest.raises(HostTierFullError, match="kept: 'a'"):
            rig.cache.register("b", "two", size_bytes=1)
        with pytest.raises(InUseError, match="'a' is in use: held by 1 leases, not pinned"):
            rig.cache.deactivate("a")
        assert rig.cache.slot_of("a") == 0

    assert rig.cache.register("b", "two", size_bytes=1)


def test_several_leases_hold_one_key_until_the_last_ends(rig: CacheRig) -> None:
    rig.register("abc")
    first = rig.cache.acquire(["a", "b"])
    second = rig.cache.acquire(["a"])

    first.release()
    first.release()

    assert rig.cache.leased_keys() == {"a": 1}
    assert rig.cache.stats().num_leases == 1
    assert rig.cache.can_admit(["c"])
    assert not rig.cache.can_admit(["b", "c"])
    second.release()
    assert rig.cache.can_admit(["b", "c"])


def test_the_slot_is_registered_after_the_copy_succeeded(rig: CacheRig) -> None:
    """C13."""
    rig.register("a")
    seen: list[tuple[int | None, tuple[str | None, ...]]] = []
    copy = rig.placer.place

    class Watcher:
        def place(self, key: str, value: str, slot: int) -> None:
            seen.append((rig.cache.slot_of(key), rig.cache.slots()))
            copy(key, value, slot)

        def clear(self, slot: int) -> None:
            raise AssertionError

    rig.cache._transfers._placer = Watcher()
    rig.cache.activate("a")

    assert seen == [(None, (None, None))]
    assert rig.cache.slot_of("a") == 0


@pytest.mark.parametrize("use", ["acquire", "activate", "pin"])
def test_a_failed_copy_leaves_the_slot_free_and_nothing_held(rig: CacheRig, use: str) -> None:
    """C13."""
    rig.activate("ab")
    rig.register("c")
    rig.placer.failing.add("c")

    with pytest.raises(PlacementError):
        getattr(rig.cache, use)("c")

    assert rig.cache.slots() == (None, "b")
    assert rig.cache.leased_keys() == {}
    assert rig.cache.pinned_keys() == ()
    assert {"a", "b", "c"} <= set(rig.cache.keys())
    assert rig.cache.stats().device.load_failures == 1
    rig.check()
    rig.placer.failing.clear()
    with rig.cache.acquire(["c"]) as lease:
        assert lease.slots == {"c": 0}


def test_a_failed_copy_in_the_middle_of_a_set_leases_none_of_it() -> None:
    rig = CacheRig.build(num_slots=3)
    rig.register("abc")
    rig.placer.failing.add("b")

    with pytest.raises(PlacementError):
        rig.cache.acquire(["a", "b", "c"])

    assert rig.cache.slots() == ("a", None, None)
    assert rig.cache.leased_keys() == {}
    assert rig.cache.stats().num_leases == 0
    rig.check()


@pytest.mark.parametrize(
    ("keys", "error"),
    [("dx", UnknownKeyError), ("abcd", SetTooLargeError), ("cd", NoFreeSlotError)],
)
def test_an_acquire_that_cannot_be_satisfied_changes_nothing(
    keys: str, error: type[Exception]
) -> None:
    """C19."""
    rig = CacheRig.build(num_slots=3, max_host=5)
    rig.activate("abe")
    rig.register("cd")
    rig.cache.pin("a")
    lease = rig.cache.acquire(["b"])
    before = (rig.cache.keys(), rig.cache.active_keys(), rig.cache.slots(), rig.cache.stats())
    placed = list(rig.placer.placed)

    with pytest.raises(error):
        rig.cache.acquire(keys)

    stats = rig.cache.stats()
    assert (rig.cache.keys(), rig.cache.active_keys(), rig.cache.slots()) == before[:3]
    assert stats.refusals == before[3].refusals + 1
    assert stats.device == before[3].device
    assert stats.host == before[3].host
    assert stats.layout_version == before[3].layout_version
    assert rig.placer.placed == placed
    lease.release()


def test_the_layout_version_changes_exactly_when_the_layout_does(rig: CacheRig) -> None:
    rig.register("abc")
    versions = [rig.cache.layout_version]
    layout_changes: list[Callable[[], object]] = [
        lambda: rig.cache.activate("a"),
        lambda: rig.cache.acquire(["b"]).release(),
        lambda: rig.cache.activate("c"),  # over the least recently used
        lambda: rig.cache.deactivate("c"),
        lambda: rig.cache.remove("b"),
        rig.cache.clear,
    ]

    for change in layout_changes:
        change()
        versions.append(rig.cache.layout_version)

    assert versions == sorted(set(versions))


def test_the_layout_version_stays_when_nothing_moves(rig: CacheRig) -> None:
    rig.activate("ab")
    before = rig.cache.layout_version

    rig.cache.activate("a")
    lease = rig.cache.acquire(["a", "b"])
    rig.register("c")
    rig.cache.pin("a")
    rig.cache.unpin("a")
    rig.cache.remove("b")  # drains: its slot stays as it is

    assert rig.cache.layout_version == before
    lease.release()
    assert rig.cache.layout_version == before + 1


def test_registering_takes_no_slot(rig: CacheRig) -> None:
    """C12."""
    rig.activate("ab")

    rig.register("c")

    assert rig.cache.slots() == ("a", "b")
    assert [key for key, _ in rig.placer.placed] == ["a", "b"]


def test_an_entry_over_the_byte_budget_is_refused_with_both_numbers() -> None:
    """C15."""
    rig = CacheRig.build(max_host_bytes=100)
    rig.register("a", size_bytes=60)

    with pytest.raises(HostTierFullError) as caught:
        rig.register("b", size_bytes=101)

    assert (caught.value.size_bytes, caught.value.max_bytes) == (101, 100)
    assert rig.cache.keys() == ("a",)
    assert rig.cache.stats().refusals == 1


def test_the_byte_budget_evicts_the_least_recently_used() -> None:
    """C15."""
    rig = CacheRig.build(max_host_bytes=100)
    rig.register("ab", size_bytes=40)

    rig.register("c", size_bytes=60)

    assert rig.cache.keys() == ("b", "c")
    assert rig.cache.stats().host_bytes == 100


def test_a_hook_that_raises_leaves_both_tiers_consistent() -> None:
    rig = CacheRig.build(num_slots=1, max_host=1)
    rig.activate("a")
    told: list[tuple[str, Tier]] = []

    def refuse(key: str, tier: Tier) -> None:
        told.append((key, tier))
        raise OSError(key)

    rig.cache._transfers._on_evict = refuse
    with pytest.raises(OSError, match="a"):
        rig.register("b")

    assert told == [("a", Tier.DEVICE)]
    assert rig.cache.slots() == (None,)
    assert rig.cache.keys() == ("a",)
    rig.check()


def test_a_touched_key_outlives_those_used_before_it() -> None:
    rig = CacheRig.build(num_slots=1, max_host=2)
    rig.register("ab")

    rig.cache.touch(["a", "unknown"])
    rig.register("c")

    assert rig.cache.keys() == ("a", "c")
    assert rig.cache.stats().host.hits == 0


def test_touching_brings_nothing_into_a_slot_and_passes_over_draining_keys() -> None:
    rig = CacheRig.build()
    rig.register("ab")

    with rig.cache.acquire(["a"]):
        rig.cache.remove("a")
        rig.cache.touch(["b", "a"])
        assert rig.cache.slots() == ("a", None)
        assert rig.cache.keys() == ("b",)


class Watcher:
    """A placer and a hook that look at the cache whenever they are called."""

    def __init__(self) -> None:
        self.cache: AdapterCache[str, str] = AdapterCache(
            placer=self, num_slots=1, max_host=2, max_host_bytes=10, on_evict=self.note
        )
        self.host_bytes: list[int] = []
        self.used_when_placing: list[int] = []

    def look(self) -> None:
        self.host_bytes.append(self.cache.stats().host_bytes)

    def note(self, key: str, tier: Tier) -> None:
        self.look()

    def place(self, key: str, value: str, slot: int) -> None:
        self.look()
        self.used_when_placing.append(self.cache.stats().slots_used)

    def clear(self, slot: int) -> None:
        self.look()


def test_c37_room_is_made_before_it_is_used() -> None:
    """At no moment that hook and placer can see do the tiers hold more than they may."""
    watcher = Watcher()

    for key in "abcab":
        watcher.cache.register(key, key, size_bytes=5)
        watcher.cache.activate(key)

    assert len(watcher.host_bytes) > 8
    assert max(watcher.host_bytes) <= 10
    assert watcher.used_when_placing == [0] * 5
