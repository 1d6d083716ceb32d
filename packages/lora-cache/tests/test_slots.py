"""The slot table alone: order, pins, lease counts, plans."""

from __future__ import annotations

import pytest

from lora_cache import InUseError, Move, SlotTable, UnknownKeyError


def table_of(keys: str, num_slots: int) -> SlotTable[str]:
    table: SlotTable[str] = SlotTable(num_slots)
    for slot, key in enumerate(keys):
        table.assign(key, slot)
    return table


def plan(table: SlotTable[str], keys: str, *, evict: bool = True) -> tuple[Move[str], ...] | None:
    return table.plan(dict.fromkeys(keys), evict=evict)


def test_a_new_table_has_only_free_slots() -> None:
    """C1."""
    table: SlotTable[str] = SlotTable(3)

    assert table.slots() == (None, None, None)
    assert len(table) == 0
    assert table.num_slots == 3
    assert repr(table) == "SlotTable([None, None, None])"


@pytest.mark.parametrize("num_slots", [0, -1])
def test_a_table_without_slots_is_refused(num_slots: int) -> None:
    with pytest.raises(ValueError, match=f"num_slots is {num_slots}, expected at least 1"):
        SlotTable(num_slots)


def test_a_plan_takes_the_lowest_free_slots_first() -> None:
    """C1."""
    table = table_of("abc", 4)
    table.free("b")
    table.free("a")

    moves = plan(table, "xy")

    assert moves == (Move(key="x", slot=0, victim=None), Move(key="y", slot=1, victim=None))


def test_a_plan_takes_the_least_recently_used_after_the_free_ones() -> None:
    table = table_of("ab", 3)
    table.touch("a")

    moves = plan(table, "xy")

    assert moves == (Move(key="x", slot=2, victim=None), Move(key="y", slot=1, victim="b"))


def test_a_plan_changes_nothing() -> None:
    table = table_of("ab", 2)
    before = (table.slots(), table.keys(), table.version)

    plan(table, "xy")
    plan(table, "xyz")

    assert (table.slots(), table.keys(), table.version) == before


def test_a_plan_never_evicts_a_member_of_the_set() -> None:
    """C7."""
    table = table_of("ab", 2)

    assert plan(table, "xa") == (Move(key="x", slot=1, victim="b"),)
    assert plan(table, "ab") == ()
    assert plan(table, "abx") is None


def test_a_plan_passes_over_pinned_and_leased_keys() -> None:
    """C11, C17."""
    table = table_of("abc", 3)
    table.pin("a")
    table.hold("b")

    assert plan(table, "x") == (Move(key="x", slot=2, victim="c"),)
    assert plan(table, "xy") is None


def test_a_plan_without_eviction_uses_free_slots_only() -> None:
    """C3."""
    table = table_of("a", 2)

    assert plan(table, "x", evict=False) == (Move(key="x", slot=1, victim=None),)
    assert plan(table, "xy", evict=False) is None


def test_a_slot_is_given_to_one_key_and_a_key_gets_one_slot() -> None:
    table = table_of("a", 2)

    with pytest.raises(ValueError, match="'a' already sits in slot 0"):
        table.assign("a", 1)
    with pytest.raises(ValueError, match="slot 0 is not free"):
        table.assign("b", 0)
    with pytest.raises(ValueError, match="slot 2 is not free"):
        table.assign("b", 2)

    assert table.slots() == ("a", None)


def test_use_moves_a_key_to_the_end_of_the_order() -> None:
    """C17."""
    table = table_of("abc", 3)

    table.touch("a")
    table.hold("b")

    assert table.keys() == ("c", "a", "b")
    assert list(table) == ["c", "a", "b"]


def test_a_pinned_or_leased_key_is_not_freed() -> None:
    """C11."""
    table = table_of("ab", 2)
    table.pin("a")
    table.hold("b")

    with pytest.raises(InUseError, match="'a' is in use: held by 0 leases, pinned"):
        table.free("a")
    with pytest.raises(InUseError, match="'b' is in use: held by 1 leases, not pinned"):
        table.free("b")

    assert table.slots() == ("a", "b")


def test_unpinned_and_unleased_keys_can_be_freed_again() -> None:
    table = table_of("a", 1)
    table.pin("a")
    table.hold("a")

    table.unpin("a")
    table.let_go("a")

    assert table.free("a") == 0
    assert "a" not in table
    assert table.slot_of("a") is None


def test_lease_counts_add_up() -> None:
    table = table_of("a", 1)
    leased = table.leased

    table.hold("a")
    table.hold("a")
    assert leased == {"a": 2}
    table.let_go("a")
    assert leased == {"a": 1}
    table.let_go("a")
    assert leased == {}


def test_holding_a_set_with_an_absent_member_holds_none() -> None:
    table = table_of("a", 2)

    with pytest.raises(UnknownKeyError) as caught:
        table.hold("axy")

    assert caught.value.keys == ("x", "y")
    assert table.leased == {}


def test_letting_go_of_what_is_not_held_changes_no_count() -> None:
    table = table_of("ab", 2)
    table.hold("a")

    with pytest.raises(UnknownKeyError):
        table.let_go("ab")

    assert table.leased == {"a": 1}


@pytest.mark.parametrize("method", ["free", "touch", "pin"])
def test_a_key_without_a_slot_is_unknown(method: str) -> None:
    table = table_of("a", 2)

    with pytest.raises(UnknownKeyError, match="not registered: 'x'"):
        getattr(table, method)("x")


def test_the_version_grows_with_the_layout_and_only_with_it() -> None:
    table: SlotTable[str] = SlotTable(2)

    table.assign("a", 0)
    assert table.version == 1
    table.touch("a")
    table.pin("a")
    table.hold("a")
    table.let_go("a")
    table.unpin("a")
    assert table.version == 1
    table.free("a")
    assert table.version == 2


def test_pins_are_listed_in_the_order_in_which_they_were_set() -> None:
    table = table_of("abc", 3)
    for key in "cab":
        table.pin(key)
    table.unpin("a")

    assert table.pinned == ("c", "b")
    assert table.is_pinned("b")
    assert not table.is_pinned("a")


def test_find_returns_the_slots_of_those_present() -> None:
    table = table_of("ab", 3)

    assert table.find("bx") == {"b": 1}
    assert table.keys() == ("a", "b")
