"""Questions about a cache, and what its limits must be."""

from __future__ import annotations

import pytest

from lora_cache import AdapterCache, Residency
from lora_cache.testing import CacheRig, RecordingPlacer


def test_residency_names_the_fastest_place(rig: CacheRig) -> None:
    rig.register("a")
    rig.activate("b")

    assert rig.cache.residency("a") is Residency.HOST
    assert rig.cache.residency("b") is Residency.DEVICE
    assert rig.cache.residency("x") is Residency.DISK
    assert str(Residency.DEVICE) == "device"


def test_says_what_it_holds(rig: CacheRig) -> None:
    rig.register("c")
    rig.activate("a")

    assert rig.cache.num_slots == 2
    assert len(rig.cache) == 2
    assert "a" in rig.cache
    assert "x" not in rig.cache
    assert rig.cache.slot_of("c") is None
    assert rig.cache.active_keys() == ("a",)
    assert repr(rig.cache) == (
        "AdapterCache(SlotTable(['a', None]), HostTier(['c', 'a'], 2 bytes))"
    )


def test_all_limits_that_are_wrong_are_named_at_once() -> None:
    with pytest.raises(ValueError, match="num_slots is 0") as caught:
        AdapterCache[str, str](placer=RecordingPlacer(), num_slots=0, max_host=-1, max_host_bytes=0)

    assert str(caught.value) == (
        "num_slots is 0, expected at least 1; max_host is -1, expected at least num_slots (0); "
        "max_host_bytes is 0, expected at least 1 or None"
    )


def test_fewer_host_places_than_slots_is_an_error_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"max_host is 3, expected at least num_slots \(4\)"):
        AdapterCache[str, str](placer=RecordingPlacer(), num_slots=4, max_host=3)


def test_as_many_host_places_as_slots_is_enough() -> None:
    cache: AdapterCache[str, str] = AdapterCache(placer=RecordingPlacer(), num_slots=4, max_host=4)

    assert cache.stats().max_host == 4
