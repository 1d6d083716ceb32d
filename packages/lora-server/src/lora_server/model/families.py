"""Which projections a family's layers run as one product, and which they store as one, as data.

A name that a model does not have is simply not found there.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig

PACKED_MODULES = MappingProxyType(
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        # BERT and its relatives, and DistilBERT.
        "qkv": ("query", "key", "value"),
        "qkv_lin": ("q_lin", "k_lin", "v_lin"),
    }
)
"""Packed name -> members, in output order."""


def fused_modules(config: PreTrainedConfig) -> Mapping[str, Mapping[str, int]]:
    """Return the parts of projections that a checkpoint may store as one, with their rows.

    Adapters of such a model may name the whole or the parts. Rows follow from the sizes in the
    configuration; where a module of that name has another number of rows, it is left whole.

    Args:
        config: the text model's configuration.

    Returns:
        Name of the whole -> names of its parts -> rows, in order.
    """
    sizes: Any = config
    heads = getattr(sizes, "num_attention_heads", None)
    hidden, inner = getattr(sizes, "hidden_size", None), getattr(sizes, "intermediate_size", None)
    found: dict[str, Mapping[str, int]] = {}
    if isinstance(heads, int) and isinstance(hidden, int):
        head_dim = getattr(sizes, "head_dim", None) or hidden // heads
        kv_heads = getattr(sizes, "num_key_value_heads", None) or heads
        rows = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        found["qkv_proj"] = dict(zip(PACKED_MODULES["qkv_proj"], rows, strict=True))
    if isinstance(inner, int):
        found["gate_up_proj"] = dict.fromkeys(PACKED_MODULES["gate_up_proj"], inner)
    return found
