"""Bytes that must move and multiply-adds that must be done, however an operator is written.

Each slot in use is read once at its true rank, each activation row that a token with an adapter
needs once, each output row is read and written. What an implementation writes down in between and
reads again does not count.

Letters: `T` tokens, `K` experts per token, `E` entries, `P` slices, `I` in, `O` out, `r` rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_kernels.bench.cases import Module

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much of a module a step uses."""

    entries: int
    """`E`: rows of x, one for each token with an adapter; pairs (token, expert) for experts."""

    rows: int
    """Rows of x that are read: as `entries`, but tokens for experts."""

    groups: int
    """Slots in use; pairs (slot, expert) in use for experts."""

    rank: int
    """`r`, of all slots alike."""

    element_size: int
    """Bytes of an element of x, y and the weights."""


def bytes_of(op: str, module: Module, load: Load) -> int:
    """Return the bytes of one call.

    - `shrink`: A, x and v in float32: `groups r P I b + rows I b + E r P 4`
    - `expand_`: B, v and y twice: `groups r O b + E r P 4 + 2 E O b`
    - `apply_lora_`, `moe_lora_`: A, x, B and y twice
    - `embedding_lora_`: r elements of A for each entry, B and y twice

    with `b` bytes an element and `O` the sum over slices.
    """
    size, num_slices = load.element_size, len(module.out_features)
    a = load.groups * load.rank * num_slices * module.in_features * size
    b = load.groups * load.rank * sum(module.out_features) * size
    x = load.rows * module.in_features * size
    y = 2 * load.entries * sum(module.out_features) * size
    v = load.entries * load.rank * num_slices * _FLOAT32_BYTES
    if op == "shrink":
        return a + x + v
    if op == "expand_":
        return b + v + y
    if op == "embedding_lora_":
        return load.entries * load.rank * size + b + y
    return a + x + b + y


def slot_bytes(op: str, module: Module, load: Load) -> int:
    """Return the bytes of the slots alone: what reading them once moves."""
    a = load.groups * load.rank * len(module.out_features) * module.in_features
    b = load.groups * load.rank * sum(module.out_features)
    parts = {"shrink": a, "expand_": b, "embedding_lora_": b}
    return parts.get(op, a + b) * load.element_size


def macs_of(op: str, module: Module, load: Load) -> int:
    """Return the multiply-adds of one call."""
    shrink = load.entries * load.rank * len(module.out_features) * module.in_features
    expand = load.entries * load.rank * sum(module.out_features)
    parts = {"shrink": shrink, "expand_": expand, "embedding_lora_": expand}
    return parts.get(op, shrink + expand)
