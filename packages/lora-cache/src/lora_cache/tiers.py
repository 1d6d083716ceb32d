"""The words for where an entry is and what happens when there is no room for another.

Knows nothing of how the tiers are kept.
"""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """A place that holds entries; named by eviction hooks and statistics."""

    HOST = "host"
    DEVICE = "device"


class Residency(StrEnum):
    """The fastest place an entry can be found in. What is in a slot is in the host tier too."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class EvictionPolicy(StrEnum):
    """What both tiers do when they are full."""

    LRU = "lru"
    """The least recently used entry that is neither pinned nor leased makes room."""
    STRICT = "strict"
    """Nothing is evicted: a full tier raises. There are no pins."""
