"""How many blocks the KV cache gets: for a model that is loaded, and for one that is planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from lora_server.memory import free_host_bytes, plan_kv

if TYPE_CHECKING:
    from lora_server.config import ServerConfig
    from lora_server.memory import KvBudget

_HOST_SHARE = 0.25
"""Part of the free host memory that the KV cache takes unless told otherwise."""
_MAX_DEFAULT_KV_BYTES = 4 * 1024**3


class KvModel(Protocol):
    """What must be known of the model."""

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of keys and values a token takes over all layers."""

    @property
    def context_length(self) -> int:
        """Positions the model was made for."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""


def choose_kv(config: ServerConfig, model: KvModel, *, reserved_bytes: int = 0) -> KvBudget:
    """Choose the size of the KV cache.

    Args:
        config: the options.
        model: whose cache it is.
        reserved_bytes: what will be taken of the memory that is free now, before the cache is.

    Raises:
        StartupError: see `plan_kv`.
    """
    return plan_kv(
        token_bytes=model.kv_token_bytes,
        block_size=config.block_size,
        context_length=model.context_length,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        memory_bytes=config.kv_cache_memory,
        default_bytes=_default_bytes(config, model.device, reserved_bytes),
    )


def _default_bytes(config: ServerConfig, device: torch.device, reserved_bytes: int) -> int:
    """Return what the KV cache may take when nobody says how much."""
    if device.type != "cuda":
        free = max(free_host_bytes() - reserved_bytes, 0)
        return min(int(free * _HOST_SHARE), _MAX_DEFAULT_KV_BYTES)
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(int(free - reserved_bytes - total * (1 - config.gpu_memory_utilization)), 0)
