"""Counters of both tiers and the frozen snapshot a caller gets of them.

Knows nothing of keys: it counts, it does not decide.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """What happened in one tier since the cache was made. All counters only grow."""

    hits: int
    """Keys asked for that were in the tier."""
    misses: int
    """Keys asked for that were not, and were brought in."""
    evictions: int
    """Entries that left to make room for another; removals by request do not count."""
    loads: int
    """Entries written into the tier: registered in the host tier, placed into a slot."""
    load_s: float
    """Seconds spent in the caller's loader (host) or placer (device), failed calls included."""
    load_failures: int
    """Calls of the loader or placer that raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """The state of a cache at one moment."""

    device: TierStats
    """The slots."""
    host: TierStats
    """The host tier."""
    refusals: int
    """Calls that raised because the cache could not do what was asked; they changed nothing."""
    num_slots: int
    """Device slots there are."""
    slots_used: int
    """Slots that hold an entry."""
    slots_pinned: int
    """Slots whose entry is pinned."""
    slots_leased: int
    """Slots whose entry at least one lease holds."""
    slots_draining: int
    """Slots whose entry is removed and waits for its last lease to end."""
    slots_placing: int
    """Slots that are being written for a key; not counted as used."""
    num_leases: int
    """Leases that are not released."""
    device_bytes: int
    """Sizes of the entries in slots added up; the slots themselves are allocated whole."""
    host_entries: int
    """Entries in the host tier, draining ones included."""
    max_host: int
    """The host tier's limit on entries."""
    host_bytes: int
    """Sizes of the entries in the host tier added up."""
    max_host_bytes: int | None
    """The host tier's byte budget; None means no limit."""
    layout_version: int
    """Grows with every change of which key sits in which slot."""


@dataclass(slots=True, kw_only=True)
class TierCounters:
    """The running form of `TierStats`; fields as there."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    loads: int = 0
    load_s: float = 0.0
    load_failures: int = 0

    def snapshot(self) -> TierStats:
        """Return the counters as they are now."""
        return TierStats(
            hits=self.hits,
            misses=self.misses,
            evictions=self.evictions,
            loads=self.loads,
            load_s=self.load_s,
            load_failures=self.load_failures,
        )
