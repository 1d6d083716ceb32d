"""Content hash of an adapter: the identity that caches, replies and metrics use.

Two adapters have one digest when they do the same to a base model: folder, file names, key order,
prefixes and training-only fields do not enter; every tensor, scaling and pattern does.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lora_weights.config import AdapterConfig

FORMAT = "lora-weights digest 1"
"""Enters the hash, so that a changed rule never yields an old digest."""


def compute_digest(
    config: AdapterConfig,
    scalings: Mapping[str, float],
    tensors: Iterable[tuple[str, str, str, tuple[int, ...], memoryview]],
) -> str:
    """Hash an adapter.

    Args:
        config: its configuration; only what is applied enters.
        scalings: module path -> factor of ``B A``, which also records the order of patterns.
        tensors: (module, part, type name, shape, raw bytes as stored), in any order.

    Returns:
        64 hex digits (SHA-256).
    """
    digest = hashlib.sha256()
    header = {
        "format": FORMAT,
        "peft_type": config.peft_type,
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "use_rslora": config.use_rslora,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
        "bias": config.bias,
        "lora_bias": config.lora_bias,
        "use_dora": config.use_dora,
        "alora_invocation_tokens": config.alora_invocation_tokens,
        "scalings": dict(scalings),
    }
    digest.update(_canonical(header))
    for module, part, dtype, shape, content in sorted(tensors, key=lambda item: item[:2]):
        digest.update(_canonical([module, part, dtype, shape]))
        digest.update(content)
    return digest.hexdigest()


def _canonical(value: object) -> bytes:
    """Return JSON that does not depend on key order, ended so that records cannot run together."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
