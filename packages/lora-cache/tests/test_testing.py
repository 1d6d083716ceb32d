"""The fakes and the consistency check: they must see what they are for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lora_cache import AdapterCache, Loaded, Tier
from lora_cache.testing import (
    CacheRig,
    ManualClock,
    PlacementError,
    RecordingHook,
    RecordingLoader,
    RecordingPlacer,
    check_consistency,
    check_device,
)


def test_the_clock_moves_only_when_told() -> None:
    clock = ManualClock()

    assert clock() == clock() == 0.0
    clock.advance(1.5)
    assert clock() == 1.5


def test_the_placer_keeps_what_it_was_given_until_it_is_written_over() -> None:
    placer: RecordingPlacer[str, str] = RecordingPlacer()

    placer.place("a", "one", 0)
    placer.place("b", "two", 0)

    assert placer.contents == {0: ("b", "two")}
    assert placer.placed == [("a", 0), ("b", 0)]


def test_a_failed_placement_loses_the_old_data_too() -> None:
    placer: RecordingPlacer[str, str] = RecordingPlacer(failing={"b"})
    placer.place("a", "one", 0)

    with pytest.raises(PlacementError, match="told to fail for 'b'"):
        placer.place("b", "two", 0)

    assert placer.contents == {}


def test_the_hook_and_the_loader_remember_what_they_were_asked() -> None:
    hook: RecordingHook[str] = RecordingHook()
    loader: RecordingLoader[str, int] = RecordingLoader(stored={"a": Loaded(value=1, size_bytes=2)})

    hook("a", Tier.HOST)

    assert loader("a") == Loaded(value=1, size_bytes=2)
    with pytest.raises(FileNotFoundError, match="nothing stored for 'x'"):
        loader("x")
    assert loader.asked == ["a", "x"]
    assert hook.evicted == [("a", Tier.HOST)]


Damage = Callable[[AdapterCache[str, str]], object]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda cache: cache._slots._slot_of.update(b=0), "not where it says"),
        (lambda cache: cache._slots._slot_of.update(x=1), "not in the host tier"),
        (lambda cache: cache._host._entries.pop("a"), "not in the host tier"),
        (lambda cache: cache._slots._pinned.update(b=None), "'b' is pinned and in no slot"),
        (lambda cache: cache._slots._num_leases.update(b=1), "'b' is leased and in no slot"),
        (lambda cache: cache._slots._num_leases.update(a=0), "a lease count is not positive"),
        (lambda cache: cache._draining.add("a"), "'a' drains and nobody holds it"),
        (lambda cache: setattr(cache._host, "_num_bytes", 101), "over its byte budget"),
        (lambda cache: setattr(cache._host, "_max_entries", 1), "too many host entries"),
    ],
)
def test_the_check_sees_damage(damage: Damage, message: str) -> None:
    rig = CacheRig.build(max_host_bytes=100)
    rig.activate("a")
    rig.register("b")
    rig.check()

    damage(rig.cache)

    with pytest.raises(AssertionError, match=message):
        check_consistency(rig.cache)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda contents: contents.clear(), "which holds nothing"),
        (lambda contents: contents.update({0: ("b", "value of b")}), "which holds 'b'"),
        (lambda contents: contents.update({0: ("a", "old")}), "holds another value of 'a'"),
    ],
)
def test_the_device_check_sees_the_wrong_data(
    rig: CacheRig, damage: Callable[[dict[int, tuple[str, str]]], object], message: str
) -> None:
    rig.activate("a")
    check_device(rig.cache, rig.placer)

    damage(rig.placer.contents)

    with pytest.raises(AssertionError, match=message):
        check_device(rig.cache, rig.placer)
