"""Loading through the cache: order of an add, failures, reloads."""

from __future__ import annotations

import pytest

from lora_cache import (
    HostTierFullError,
    InUseError,
    Loaded,
    LoadFailedError,
    RemovingError,
    Tier,
)
from lora_cache.testing import CacheRig, PlacementError, RecordingLoader


@pytest.fixture
def loader() -> RecordingLoader[str, str]:
    stored = {key: Loaded(value=f"stored {key}", size_bytes=10) for key in "abcd"}
    return RecordingLoader(stored=stored)


def test_a_known_key_is_not_loaded_and_counts_as_used(
    rig: CacheRig, loader: RecordingLoader[str, str]
) -> None:
    """C2, C4."""
    rig.register("ab")

    value = rig.cache.load("a", loader)

    assert value == "value of a"
    assert loader.asked == []
    assert rig.cache.keys() == ("b", "a")


def test_an_unknown_key_is_loaded_and_registered(
    rig: CacheRig, loader: RecordingLoader[str, str]
) -> None:
    value = rig.cache.load("a", loader)

    assert value == rig.cache.get("a") == "stored a"
    assert rig.cache.stats().host_bytes == 10
    assert rig.cache.slots() == (None, None)


def test_a_failed_load_evicts_nothing(loader: RecordingLoader[str, str]) -> None:
    """C12."""
    rig = CacheRig.build(num_slots=1, max_host=1)
    rig.register("a")

    with pytest.raises(LoadFailedError, match="loading 'x' failed: nothing stored") as caught:
        rig.cache.load("x", loader)

    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert rig.cache.keys() == ("a",)
    assert rig.hook.evicted == []
    assert rig.cache.stats().host.load_failures == 1


def test_room_is_made_after_the_load() -> None:
    """C12: while it loads, the tier is full and the entry is one too many."""
    rig = CacheRig.build(num_slots=1, max_host=1)
    rig.register("a")
    seen: list[tuple[str, ...]] = []

    def load(key: str) -> Loaded[str]:
        seen.append(rig.cache.keys())
        return Loaded(value="new", size_bytes=1)

    rig.cache.load("b", load)

    assert seen == [("a",)]
    assert rig.cache.keys() == ("b",)
    assert rig.hook.evicted == [("a", Tier.HOST)]


def test_loading_takes_no_slot_in_use(rig: CacheRig, loader: RecordingLoader[str, str]) -> None:
    """C12."""
    rig.activate("ab")

    rig.cache.load("c", loader)

    assert rig.cache.slots() == ("a", "b")


def test_the_old_version_goes_before_others_are_evicted(loader: RecordingLoader[str, str]) -> None:
    """C12."""
    rig = CacheRig.build(num_slots=1, max_host=2, max_host_bytes=20)
    rig.register("ab", size_bytes=10)

    value = rig.cache.reload("b", loader)

    assert value == rig.cache.get("b") == "stored b"
    assert rig.cache.keys() == ("a", "b")
    assert rig.hook.evicted == []


def test_a_reload_gives_up_the_slot_with_the_old_content(
    rig: CacheRig, loader: RecordingLoader[str, str]
) -> None:
    rig.activate("a")
    before = rig.cache.layout_version

    rig.cache.reload("a", loader)
    assert rig.cache.slot_of("a") is None
    rig.cache.activate("a")

    assert rig.placer.contents[0] == ("a", "stored a")
    assert rig.cache.layout_version > before
    rig.check()


def test_a_failed_reload_keeps_the_old_version_serving(
    rig: CacheRig, loader: RecordingLoader[str, str]
) -> None:
    """C12."""
    rig.activate("a")
    del loader.stored["a"]
    layout_version = rig.cache.layout_version

    with pytest.raises(LoadFailedError):
        rig.cache.reload("a", loader)

    assert rig.cache.get("a") == "value of a"
    assert rig.cache.slot_of("a") == 0
    assert rig.cache.layout_version == layout_version


def test_a_reload_that_does_not_fit_keeps_the_old_version() -> None:
    rig = CacheRig.build(max_host_bytes=10)
    rig.activate("a")

    with pytest.raises(HostTierFullError):
        rig.cache.reload("a", RecordingLoader(stored={"a": Loaded(value="big", size_bytes=11)}))

    assert rig.cache.get("a") == "value of a"
    assert rig.cache.slot_of("a") == 0


def test_a_leased_version_is_not_replaced(rig: CacheRig, loader: RecordingLoader[str, str]) -> None:
    """C11."""
    rig.register("a")

    with rig.cache.acquire(["a"]), pytest.raises(InUseError):
        rig.cache.reload("a", loader)

    assert loader.asked == []
    assert rig.cache.get("a") == "value of a"


def test_a_pinned_key_is_placed_again_and_stays_pinned(
    rig: CacheRig, loader: RecordingLoader[str, str]
) -> None:
    rig.register("a")
    rig.cache.pin("a")

    rig.cache.reload("a", loader)

    assert rig.cache.is_pinned("a")
    assert rig.placer.contents[0] == ("a", "stored a")
    rig.check()


def test_a_pinned_key_whose_new_version_cannot_be_placed_is_unpinned(
    rig: CacheRig, loader: RecordingLoader[str, str]
) -> None:
    rig.register("a")
    rig.cache.pin("a")
    rig.placer.failing.add("a")

    with pytest.raises(PlacementError):
        rig.cache.reload("a", loader)

    assert rig.cache.pinned_keys() == ()
    assert rig.cache.get("a") == "stored a"
    rig.check()


@pytest.mark.parametrize("method", ["load", "reload"])
def test_a_draining_key_is_not_loaded(
    rig: CacheRig, loader: RecordingLoader[str, str], method: str
) -> None:
    rig.register("a")

    with rig.cache.acquire(["a"]):
        rig.cache.remove("a")
        with pytest.raises(RemovingError):
            getattr(rig.cache, method)("a", loader)

    assert loader.asked == []


def test_reloading_an_unknown_key_loads_it(
    rig: CacheRig, loader: RecordingLoader[str, str]
) -> None:
    assert rig.cache.reload("a", loader) == "stored a"
    assert rig.cache.keys() == ("a",)


def test_an_error_without_text_is_named_by_its_class(rig: CacheRig) -> None:
    def fail(key: str) -> Loaded[str]:
        raise MemoryError

    with pytest.raises(LoadFailedError, match="loading 'a' failed: MemoryError"):
        rig.cache.load("a", fail)
