"""Pins: both tiers, the last unpinned slot, and what they block."""

from __future__ import annotations

import pytest

from lora_cache import (
    EvictionPolicy,
    HostTierFullError,
    InUseError,
    NoFreeSlotError,
    NoPinsError,
    UnknownKeyError,
)
from lora_cache.testing import CacheRig


def test_pinning_activates_and_keeps_the_key_in_both_tiers() -> None:
    """C9."""
    rig = CacheRig.build(num_slots=2, max_host=2)
    rig.register("a")

    rig.cache.pin("a")
    for key in "bcd":
        rig.activate(key)

    assert rig.cache.is_pinned("a")
    assert rig.cache.slots() == ("a", "d")
    assert rig.cache.keys() == ("a", "d")
    rig.check()


def test_pinning_evicts_the_least_recently_used_if_need_be(rig: CacheRig) -> None:
    rig.activate("ab")
    rig.register("c")

    rig.cache.pin("c")

    assert rig.cache.slots() == ("c", "b")


@pytest.mark.parametrize("method", ["pin", "unpin"])
def test_an_unknown_key_has_no_pin(rig: CacheRig, method: str) -> None:
    """C9."""
    with pytest.raises(UnknownKeyError, match="not registered: 'x'"):
        getattr(rig.cache, method)("x")

    assert not rig.cache.is_pinned("x")


def test_pinning_when_every_slot_is_pinned_is_an_error() -> None:
    """C9."""
    rig = CacheRig.build(num_slots=2, allow_pin_all=True)
    rig.register("abc")
    rig.cache.pin("a")
    rig.cache.pin("b")

    with pytest.raises(NoFreeSlotError) as caught:
        rig.cache.pin("c")

    assert caught.value.pinned == ("a", "b")
    assert caught.value.is_blocked_by_pins
    assert not rig.cache.is_pinned("c")


def test_pinning_the_last_unpinned_slot_is_refused_with_the_pins_named(rig: CacheRig) -> None:
    """C10."""
    rig.register("ab")
    rig.cache.pin("a")

    with pytest.raises(NoFreeSlotError, match="pinned: 'a'"):
        rig.cache.pin("b")

    assert rig.cache.pinned_keys() == ("a",)
    assert rig.cache.slots() == ("a", None)


def test_one_slot_can_be_pinned_only_when_all_may_be() -> None:
    """C10."""
    careful = CacheRig.build(num_slots=1)
    careful.register("a")
    daring = CacheRig.build(num_slots=1, allow_pin_all=True)
    daring.register("a")

    with pytest.raises(NoFreeSlotError):
        careful.cache.pin("a")
    daring.cache.pin("a")

    assert careful.cache.slots() == (None,)
    assert daring.cache.slots() == ("a",)


def test_a_set_that_pins_block_for_ever_is_told_apart_from_one_that_may_wait() -> None:
    """C10: refused at once with the pins named, it does not wait for ever."""
    rig = CacheRig.build(num_slots=2, allow_pin_all=True)
    rig.register("abc")
    rig.cache.pin("a")

    with rig.cache.acquire(["b"]):
        assert rig.cache.fits_beside_pins(["c"])
        with pytest.raises(NoFreeSlotError) as waits:
            rig.cache.acquire(["c"])
    rig.cache.pin("b")
    assert not rig.cache.fits_beside_pins(["c"])
    with pytest.raises(NoFreeSlotError) as blocked:
        rig.cache.acquire(["c"])

    assert not waits.value.is_blocked_by_pins
    assert waits.value.leased == ("b",)
    assert blocked.value.is_blocked_by_pins
    assert blocked.value.pinned == ("a", "b")


def test_pinned_members_of_a_set_need_no_further_slot(rig: CacheRig) -> None:
    rig.register("ab")
    rig.cache.pin("a")

    assert rig.cache.fits_beside_pins(["a", "b"])
    with rig.cache.acquire(["a", "b"]) as lease:
        assert lease.slots == {"a": 0, "b": 1}


def test_pinning_again_changes_nothing(rig: CacheRig) -> None:
    rig.register("a")
    rig.cache.pin("a")
    before = rig.cache.stats()

    rig.cache.pin("a")

    assert rig.cache.stats() == before


def test_an_unpinned_key_can_be_evicted_again(rig: CacheRig) -> None:
    """C9."""
    rig.activate("ab")
    rig.cache.pin("a")
    rig.cache.unpin("a")
    rig.cache.unpin("a")
    rig.cache.activate("b")

    rig.activate("c")

    assert rig.cache.slots() == ("c", "b")


def test_removing_a_pinned_key_unpins_it(rig: CacheRig) -> None:
    """C9, C17."""
    rig.register("a")
    rig.cache.pin("a")

    assert rig.cache.remove("a")

    assert rig.cache.pinned_keys() == ()
    assert rig.cache.slots() == (None, None)
    rig.register("a")
    assert not rig.cache.is_pinned("a")
    rig.check()


def test_a_pinned_key_is_not_deactivated(rig: CacheRig) -> None:
    rig.register("a")
    rig.cache.pin("a")

    with pytest.raises(InUseError, match="'a' is in use: held by 0 leases, pinned"):
        rig.cache.deactivate("a")

    assert rig.cache.slots() == ("a", None)


def test_the_strict_policy_has_no_pins() -> None:
    """C9."""
    rig = CacheRig.build(policy=EvictionPolicy.STRICT)
    rig.register("a")

    with pytest.raises(NoPinsError):
        rig.cache.pin("a")
    with pytest.raises(NoPinsError):
        rig.cache.unpin("a")

    assert rig.cache.slots() == (None, None)


def test_pinning_waits_for_leases_rather_than_evicting_them(rig: CacheRig) -> None:
    """C11."""
    rig.register("abc")

    with rig.cache.acquire(["a", "b"]):
        with pytest.raises(NoFreeSlotError) as caught:
            rig.cache.pin("c")
        assert not caught.value.is_blocked_by_pins
    rig.cache.pin("c")

    assert rig.cache.is_pinned("c")


def test_a_host_tier_full_of_pins_and_leases_refuses_a_new_entry() -> None:
    rig = CacheRig.build(num_slots=2, max_host=2)
    rig.register("ab")
    rig.cache.pin("a")

    with rig.cache.acquire(["b"]), pytest.raises(HostTierFullError, match="kept: 'a', 'b'"):
        rig.register("c")

    assert rig.cache.keys() == ("a", "b")
