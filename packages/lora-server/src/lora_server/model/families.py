"""Which projections a family's layers run as one product, as data.

A name that a model does not have is simply not found there.
"""

from __future__ import annotations

from types import MappingProxyType

PACKED_MODULES = MappingProxyType(
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
)
"""Packed name -> members, in output order."""
