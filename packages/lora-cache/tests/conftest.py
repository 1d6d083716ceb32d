"""A cache with recording parts around it, ready for one test."""

from __future__ import annotations

import pytest

from lora_cache.testing import CacheRig


@pytest.fixture
def rig() -> CacheRig:
    """Two slots, four host places, least recently used goes first."""
    return CacheRig.build()
