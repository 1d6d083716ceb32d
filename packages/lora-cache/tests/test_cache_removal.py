"""Removal: at once when idle, by draining when leased; restore and clear."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lora_cache import RemovingError, Residency, UnknownKeyError

if TYPE_CHECKING:
    from lora_cache.testing import CacheRig


def test_an_idle_key_is_freed_at_once_and_its_slot_cleared(rig: CacheRig) -> None:
    """C5."""
    rig.activate("a")

    assert rig.cache.remove("a")

    assert rig.cache.slots() == (None, None)
    assert "a" not in rig.cache
    assert rig.placer.cleared == [0]
    assert rig.cache.stats().host_bytes == 0
    assert rig.hook.evicted == []


def test_a_key_in_no_slot_is_removed_without_clearing_any(rig: CacheRig) -> None:
    rig.register("a")

    assert rig.cache.remove("a")

    assert rig.placer.cleared == []


def test_removing_what_is_unknown_returns_false(rig: CacheRig) -> None:
    assert not rig.cache.remove("a")


def test_a_leased_key_is_gone_at_once_and_freed_when_the_last_lease_ends(rig: CacheRig) -> None:
    """C11."""
    rig.register("a")
    first = rig.cache.acquire(["a"])
    second = rig.cache.acquire(["a"])

    assert rig.cache.remove("a")

    assert "a" not in rig.cache
    assert rig.cache.keys() == ()
    assert not rig.cache.can_admit(["a"])
    assert rig.cache.slot_of("a") == 0
    assert rig.cache.residency("a") is Residency.DEVICE
    assert rig.cache.draining_keys() == {"a"}
    rig.check()
    first.release()
    assert rig.placer.cleared == []
    second.release()
    assert rig.placer.cleared == [0]
    assert rig.cache.slots() == (None, None)
    assert rig.cache.draining_keys() == frozenset()
    assert rig.cache.residency("a") is Residency.DISK
    assert rig.cache.stats().host_entries == 0


@pytest.mark.parametrize("method", ["activate", "pin", "unpin", "get"])
def test_a_draining_key_is_unknown(rig: CacheRig, method: str) -> None:
    """C11."""
    rig.register("a")

    with rig.cache.acquire(["a"]):
        rig.cache.remove("a")
        with pytest.raises(UnknownKeyError):
            getattr(rig.cache, method)("a")
        with pytest.raises(UnknownKeyError):
            rig.cache.acquire(["a"])
        assert not rig.cache.remove("a")


def test_a_draining_key_cannot_be_registered_before_it_is_gone(rig: CacheRig) -> None:
    rig.register("a")

    with rig.cache.acquire(["a"]):
        rig.cache.remove("a")
        with pytest.raises(RemovingError, match="'a' is being removed: 1 leases still hold it"):
            rig.register("a")
    assert rig.cache.register("a", "new", size_bytes=1)

    assert rig.cache.get("a") == "new"
    assert rig.cache.slot_of("a") is None
    rig.check()


def test_a_draining_slot_is_not_given_to_another(rig: CacheRig) -> None:
    """C11."""
    rig.register("abc")

    with rig.cache.acquire(["a"]):
        rig.cache.remove("a")
        assert not rig.cache.can_admit(["b", "c"])
        with rig.cache.acquire(["b"]) as lease:
            assert lease.slots == {"b": 1}
    assert rig.cache.can_admit(["b", "c"])


def test_a_draining_key_can_be_restored(rig: CacheRig) -> None:
    rig.register("a")
    rig.cache.pin("a")
    lease = rig.cache.acquire(["a"])
    rig.cache.remove("a")

    assert rig.cache.restore("a")
    assert not rig.cache.restore("a")
    lease.release()

    assert "a" in rig.cache
    assert rig.cache.slot_of("a") == 0
    assert rig.cache.get("a") == "value of a"
    assert not rig.cache.is_pinned("a")
    assert rig.placer.cleared == []
    rig.check()


def test_restoring_what_does_not_drain_changes_nothing(rig: CacheRig) -> None:
    rig.register("a")

    assert not rig.cache.restore("a")
    assert not rig.cache.restore("x")

    assert rig.cache.keys() == ("a",)


def test_clear_drops_both_tiers_and_the_slot_table(rig: CacheRig) -> None:
    """C18."""
    rig.activate("ab")
    rig.register("c")
    rig.cache.pin("a")

    rig.cache.clear()

    assert rig.cache.slots() == (None, None)
    assert rig.cache.keys() == rig.cache.active_keys() == rig.cache.pinned_keys() == ()
    assert sorted(rig.placer.cleared) == [0, 1]
    assert rig.cache.stats().host_bytes == 0


def test_clear_changes_the_layout_version_even_of_an_empty_cache(rig: CacheRig) -> None:
    """C18: whoever remembers a mapping by the layout version forgets it."""
    before = rig.cache.layout_version

    rig.cache.clear()

    assert rig.cache.layout_version > before


def test_clear_lets_leased_keys_drain(rig: CacheRig) -> None:
    """C11, C18."""
    rig.register("ab")
    rig.cache.activate("b")

    with rig.cache.acquire(["a"]) as lease:
        rig.cache.clear()
        assert rig.cache.keys() == ()
        assert rig.cache.slot_of("a") == lease.slots["a"]
        assert rig.cache.slot_of("b") is None
        rig.check()

    assert rig.cache.slots() == (None, None)


def test_an_error_of_the_placer_in_clear_leaves_the_key_gone(rig: CacheRig) -> None:
    rig.activate("a")

    class Broken:
        def place(self, key: str, value: str, slot: int) -> None:
            raise AssertionError

        def clear(self, slot: int) -> None:
            raise OSError(slot)

    rig.cache._transfers._placer = Broken()
    with pytest.raises(OSError, match="0"):
        rig.cache.remove("a")

    assert "a" not in rig.cache
    assert rig.cache.slots() == (None, None)
    rig.check()
