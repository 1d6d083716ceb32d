"""Output rows of what a module gets: how many there are, and a part of them.

B, gain, bias and whole weights run over the same `O` rows, so they are cut together; A belongs to
the inputs and is shared. Knows nothing of packed modules or of ranks of a process group.
Shapes: `r` rank, `I` in, `O` out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lora_weights.modules import FullModule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lora_weights.bound import BoundPart

Span = tuple[int, int]
"""Half-open range of rows: first, one past the last."""


def count_rows(part: BoundPart) -> int | None:
    """Return `O`, the output rows of a part; None when nothing in it has rows of its own.

    Raises:
        ValueError: pair, gain, bias and whole weight disagree.
    """
    counts = {
        "lora_B": None if part.pair is None else part.pair.out_features,
        "gain": None if part.gain is None else part.gain.shape[0],
        "bias": None if part.bias is None else part.bias.shape[0],
        "weight": None if part.full is None else part.full.weight.shape[0],
    }
    found = {name: count for name, count in counts.items() if count is not None}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in found.items())
        raise ValueError(f"rows of one part differ: {listed}")
    return next(iter(found.values()), None)


def take_rows(tensor: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """Return spans of a tensor's first dimension one after another; one span is a view."""
    if len(spans) == 1:
        start, end = spans[0]
        return tensor[start:end]
    return torch.cat([tensor[start:end] for start, end in spans])


def take_part(part: BoundPart, spans: Sequence[Span]) -> BoundPart:
    """Return a part of some of the output rows; `lora_a` is the same tensor.

    Args:
        part: of a linear module; a part of an embedding or of experts has no output rows.
        spans: ranges of rows, in the order wanted.
    """
    assert part.experts is None, "experts are cut by experts and by columns, not by rows"
    pair, full = part.pair, part.full
    if pair is not None:
        assert not pair.is_embedding, "an embedding is not cut by rows"
        pair = replace(pair, lora_b=take_rows(pair.lora_b, spans))
    if full is not None:
        bias = None if full.bias is None else take_rows(full.bias, spans)
        full = FullModule(weight=take_rows(full.weight, spans), bias=bias)
    return replace(
        part,
        pair=pair,
        full=full,
        gain=None if part.gain is None else take_rows(part.gain, spans),
        bias=None if part.bias is None else take_rows(part.bias, spans),
    )
