"""What the metrics read at a scrape, as Protocols, so that this layer imports none above it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class TierSnapshot(Protocol):
    """Counters of one tier of the adapter cache, from its start."""

    @property
    def hits(self) -> int:
        """Adapters asked for that were there."""
        ...

    @property
    def misses(self) -> int:
        """Adapters asked for that had to be brought in."""
        ...

    @property
    def evictions(self) -> int:
        """Adapters that made room for another."""
        ...

    @property
    def loads(self) -> int:
        """Adapters written into the tier."""
        ...

    @property
    def load_s(self) -> float:
        """Seconds spent on that."""
        ...

    @property
    def load_failures(self) -> int:
        """Adapters that could not be written into the tier."""
        ...


class CacheSnapshot(Protocol):
    """The adapter cache at one moment."""

    @property
    def device(self) -> TierSnapshot:
        """The slots."""
        ...

    @property
    def host(self) -> TierSnapshot:
        """Host memory."""
        ...

    @property
    def slots_placing(self) -> int:
        """Slots that are being written."""
        ...

    @property
    def slots_pinned(self) -> int:
        """Slots whose adapter is never evicted."""
        ...

    @property
    def slots_leased(self) -> int:
        """Slots that running requests use."""
        ...

    @property
    def device_bytes(self) -> int:
        """Bytes of the adapters in slots."""
        ...

    @property
    def host_bytes(self) -> int:
        """Bytes of the adapters in host memory."""
        ...


class EngineSnapshot(Protocol):
    """The engine at one moment; the counters grow from its start."""

    @property
    def num_running(self) -> int:
        """Sequences that are being generated."""
        ...

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to be admitted."""
        ...

    @property
    def num_waiting_for_slot(self) -> int:
        """Of the waiting ones, those that lack nothing but an adapter slot."""
        ...

    @property
    def num_waiting_for_load(self) -> int:
        """Of the waiting ones, those whose adapters are being read."""
        ...

    @property
    def kv_blocks_total(self) -> int:
        """Blocks of the KV pool."""
        ...

    @property
    def kv_block_size(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def kv_blocks_used(self) -> int:
        """Blocks that running sequences hold."""
        ...

    @property
    def kv_blocks_kept(self) -> int:
        """Blocks that nobody holds and a prompt may still find."""
        ...

    @property
    def prefix_queries(self) -> int:
        """Prompt tokens looked up in the prefix cache."""
        ...

    @property
    def prefix_hits(self) -> int:
        """Prompt tokens found there."""
        ...

    @property
    def preemptions(self) -> int:
        """Sequences that were sent back to wait."""
        ...

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled, those of unfinished requests included."""
        ...

    @property
    def running_adapters(self) -> Sequence[str]:
        """Digests of the adapters of running sequences."""
        ...

    @property
    def waiting_adapters(self) -> Sequence[str]:
        """Digests of the adapters of waiting sequences."""
        ...

    @property
    def slots_total(self) -> int:
        """Device slots there are."""
        ...

    @property
    def slots_used(self) -> int:
        """Slots that hold an adapter."""
        ...

    @property
    def cache(self) -> CacheSnapshot | None:
        """None where adapters are switched off."""
        ...


class ServedAdapter(Protocol):
    """One adapter of the catalog."""

    @property
    def name(self) -> str:
        """Its exact name."""
        ...

    @property
    def digest(self) -> str:
        """Its content."""
        ...

    @property
    def residency(self) -> str:
        """`device`, `host` or `disk`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeState:
    """What is read at the moment of a scrape."""

    engine: EngineSnapshot
    adapters: Sequence[ServedAdapter]
    now_s: float
    """Seconds since 1970."""
