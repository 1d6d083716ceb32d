"""EngineStats: what an engine tells of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_cache import CacheStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Numbers of the engine at one moment; counters grow from the start."""

    num_running: int
    num_waiting: int
    num_waiting_for_slot: int
    """Of the waiting ones, those that lack nothing but an adapter slot."""
    num_waiting_for_load: int
    """Of the waiting ones, those whose adapters are being read."""
    kv_blocks_total: int
    kv_block_size: int
    """Tokens of a block."""
    kv_blocks_used: int
    kv_blocks_kept: int
    """Without a user, but findable by what they hold."""
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int
    """Prompt tokens found there."""
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    running_adapters: tuple[str, ...]
    """Digests, sorted."""
    waiting_adapters: tuple[str, ...]
    """Digests, sorted."""
    slots_total: int
    slots_used: int
    cache: CacheStats | None
    """None when LoRA is switched off."""
