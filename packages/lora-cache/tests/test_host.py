"""The host tier alone: limits, order, pins."""

from __future__ import annotations

import pytest

from lora_cache import EvictionPolicy, HostTier, HostTierFullError, InUseError, UnknownKeyError


def tier_of(
    keys: str,
    *,
    max_entries: int,
    max_bytes: int | None = None,
    policy: EvictionPolicy = EvictionPolicy.LRU,
) -> HostTier[str, str]:
    tier: HostTier[str, str] = HostTier(max_entries=max_entries, max_bytes=max_bytes, policy=policy)
    for key in keys:
        tier.add(key, f"value of {key}", size_bytes=10)
    return tier


def test_evicts_the_least_recently_used_entry() -> None:
    """C17: add 1 and 2, use 1, add 3 with two places: 2 goes."""
    tier = tier_of("12", max_entries=2)
    tier.touch("1")

    evicted = tier.add("3", "three", size_bytes=10)

    assert evicted == ("2",)
    assert tier.keys() == ("1", "3")
    assert tier.get("3") == "three"


def test_passes_over_pinned_and_kept_entries() -> None:
    """C11, C17."""
    tier = tier_of("abc", max_entries=3)
    tier.pin("a")

    evicted = tier.add("d", "four", size_bytes=10, keep={"b"})

    assert evicted == ("c",)


def test_evicts_as_many_as_the_bytes_need() -> None:
    """C15."""
    tier = tier_of("abc", max_entries=9, max_bytes=35)

    evicted = tier.add("d", "four", size_bytes=20)

    assert evicted == ("a", "b")
    assert tier.num_bytes == 30


def test_an_entry_larger_than_the_budget_is_refused_with_both_numbers() -> None:
    """C15."""
    tier = tier_of("a", max_entries=9, max_bytes=35)

    with pytest.raises(HostTierFullError) as caught:
        tier.add("d", "four", size_bytes=36)

    assert str(caught.value) == "'d' needs 36 bytes, the host tier's whole budget is 35 bytes"
    assert (caught.value.size_bytes, caught.value.max_bytes) == (36, 35)
    assert tier.keys() == ("a",)


def test_an_entry_of_just_the_budget_fits() -> None:
    tier = tier_of("a", max_entries=9, max_bytes=35)

    assert tier.add("d", "four", size_bytes=35) == ("a",)


def test_a_full_tier_names_what_it_must_keep() -> None:
    tier = tier_of("ab", max_entries=2, max_bytes=100)
    tier.pin("a")

    with pytest.raises(HostTierFullError) as caught:
        tier.add("c", "three", size_bytes=7, keep={"b"})

    assert str(caught.value) == (
        "no free adapter slots in the host tier for 'c' (7 bytes): 2 entries of 20 bytes there, "
        "limits 2 entries and 100 bytes; kept: 'a', 'b'"
    )
    assert caught.value.kept == ("a", "b")
    assert tier.keys() == ("a", "b")


def test_a_refused_entry_evicts_nobody_even_if_some_could_go() -> None:
    tier = tier_of("ab", max_entries=9, max_bytes=25)
    tier.pin("b")

    with pytest.raises(HostTierFullError):
        tier.add("c", "three", size_bytes=20)

    assert tier.keys() == ("a", "b")


@pytest.mark.parametrize("limits", [{"max_entries": 2}, {"max_entries": 9, "max_bytes": 25}])
def test_the_strict_policy_raises_when_full(limits: dict[str, int]) -> None:
    """C3."""
    tier = tier_of("ab", policy=EvictionPolicy.STRICT, **limits)

    with pytest.raises(HostTierFullError, match="no free adapter slots in the host tier for 'c'"):
        tier.add("c", "three", size_bytes=10)

    assert tier.keys() == ("a", "b")


def test_a_new_version_replaces_the_old_one_without_evicting_others() -> None:
    """C12."""
    tier = tier_of("ab", max_entries=2, max_bytes=30)

    evicted = tier.add("a", "new", size_bytes=20)

    assert evicted == ()
    assert tier.get("a") == "new"
    assert tier.keys() == ("b", "a")
    assert tier.num_bytes == 30
    assert tier.size_of("a") == 20


def test_a_pin_survives_a_new_version() -> None:
    tier = tier_of("a", max_entries=1)
    tier.pin("a")

    tier.add("a", "new", size_bytes=1)

    assert tier.is_pinned("a")


def test_looking_is_not_use() -> None:
    tier = tier_of("ab", max_entries=2)

    tier.get("a")
    tier.size_of("a")

    assert tier.keys() == ("a", "b")


def test_removing_gives_the_bytes_back() -> None:
    tier = tier_of("ab", max_entries=2)

    tier.remove("a")

    assert tier.num_bytes == 10
    assert "a" not in tier
    assert list(tier) == ["b"]
    assert len(tier) == 1


def test_a_pinned_entry_is_not_removed_before_it_is_unpinned() -> None:
    tier = tier_of("a", max_entries=1)
    tier.pin("a")

    with pytest.raises(InUseError):
        tier.remove("a")
    tier.unpin("a")
    tier.remove("a")

    assert len(tier) == 0


@pytest.mark.parametrize("method", ["get", "size_of", "remove", "pin", "touch"])
def test_an_absent_key_is_unknown(method: str) -> None:
    tier = tier_of("a", max_entries=1)

    with pytest.raises(UnknownKeyError, match="not registered: 'x'"):
        getattr(tier, method)("x")


def test_touching_a_set_with_an_absent_member_changes_no_order() -> None:
    tier = tier_of("ab", max_entries=2)

    with pytest.raises(UnknownKeyError):
        tier.touch("ax")

    assert tier.keys() == ("a", "b")


@pytest.mark.parametrize(
    ("max_entries", "max_bytes", "message"),
    [(0, None, "max_entries is 0"), (1, 0, "max_bytes is 0")],
)
def test_limits_below_one_are_refused(
    max_entries: int, max_bytes: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        HostTier(max_entries=max_entries, max_bytes=max_bytes)


def test_a_negative_size_is_refused() -> None:
    tier = tier_of("a", max_entries=1)

    with pytest.raises(ValueError, match="size_bytes of 'b' is -1, expected at least 0"):
        tier.add("b", "two", size_bytes=-1)

    assert tier.keys() == ("a",)


def test_says_what_it_holds_in_its_repr() -> None:
    tier = tier_of("ab", max_entries=2, max_bytes=99)

    assert repr(tier) == "HostTier(['a', 'b'], 20 bytes)"
    assert (tier.max_entries, tier.max_bytes) == (2, 99)
