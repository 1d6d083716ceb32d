"""The errors: their tree, their facts, their texts."""

from __future__ import annotations

import re

import pytest

from lora_cache import (
    CacheError,
    HostTierFullError,
    LoadFailedError,
    NoFreeSlotError,
    NoPinsError,
    RemovingError,
    SetTooLargeError,
    UnknownKeyError,
    errors,
)

LINE = re.compile(r"^(?P<indent> *)(?P<name>\w+Error)(?: \((?P<kind>\w+)\))?$", re.MULTILINE)


def drawn_tree() -> dict[str, tuple[str, ...]]:
    """Return name -> names of bases, as the module's docstring draws them."""
    tree: dict[str, tuple[str, ...]] = {}
    parents: list[str] = []
    for line in LINE.finditer(errors.__doc__ or ""):
        depth = len(line["indent"]) // 4
        parents[depth:] = [line["name"]]
        bases = [parents[depth - 1] if depth else "Exception"]
        tree[line["name"]] = (*bases, line["kind"]) if line["kind"] else tuple(bases)
    return tree


def test_the_drawn_tree_is_the_tree_of_the_classes() -> None:
    classes = {
        name: tuple(base.__name__ for base in value.__bases__)
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }

    assert drawn_tree() == classes
    assert len(classes) == 9


def test_unknown_keys_are_all_named() -> None:
    error = UnknownKeyError(["a", "b"])

    assert str(error) == "not registered: 'a', 'b'"
    assert error.keys == ("a", "b")
    assert isinstance(error, LookupError)


def test_long_lists_are_cut_in_the_text_and_whole_in_the_attribute() -> None:
    error = UnknownKeyError(range(20))

    assert str(error) == "not registered: 0, 1, 2, 3, 4, 5, 6, 7, 12 more"
    assert error.keys == tuple(range(20))


def test_a_set_that_is_too_large_names_both_numbers() -> None:
    """C6."""
    error = SetTooLargeError(num_keys=3, num_slots=2)

    assert str(error) == "the set has 3 distinct keys, the table has 2 slots"
    assert isinstance(error, ValueError)


def test_a_missing_slot_names_pins_and_leases() -> None:
    """C10."""
    error = NoFreeSlotError(
        keys=["c"], num_slots=2, pinned=["a"], leased=[], is_blocked_by_pins=False
    )

    assert str(error) == "no free adapter slots for 'c': 2 in all; pinned: 'a'; leased: none"
    assert (error.keys, error.pinned, error.leased) == (("c",), ("a",), ())


def test_a_full_host_tier_without_a_byte_budget_says_so() -> None:
    error = HostTierFullError(
        key="c",
        size_bytes=5,
        num_bytes=20,
        max_bytes=None,
        num_entries=2,
        max_entries=2,
        kept=["a", "b"],
    )

    assert "limits 2 entries and no byte budget; kept: 'a', 'b'" in str(error)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NoPinsError("a"), "'a': the policy 'strict' evicts nothing and has no pins"),
        (
            RemovingError(key="a", num_leases=2),
            "'a' is being removed: 2 leases still hold it",
        ),
        (LoadFailedError(key="a", reason="no such file"), "loading 'a' failed: no such file"),
    ],
)
def test_each_error_names_the_key(error: CacheError, text: str) -> None:
    assert str(error) == text
    assert isinstance(error, RuntimeError)
