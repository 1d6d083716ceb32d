"""Counting keys as used without bringing them anywhere."""

from __future__ import annotations

from lora_cache import AdapterCache
from lora_cache.testing import RecordingPlacer


def test_a_touched_key_outlives_those_used_before_it():
    cache = AdapterCache(placer=RecordingPlacer(), num_slots=1, max_host=2)
    cache.register("a", 1, size_bytes=1)
    cache.register("b", 2, size_bytes=1)

    cache.touch(["a", "unknown"])
    cache.register("c", 3, size_bytes=1)

    assert cache.keys() == ("a", "c")
    assert cache.stats().host.hits == 0
