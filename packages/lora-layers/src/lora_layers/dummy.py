"""Adapters of zeros for warm-up and profiling: they cost what real ones cost and change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_layers.content import PreparedAdapter, SlotContent, make_prepared

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lora_layers.wrappers import SlotStack

DUMMY_RANK = 8
"""Rank of a dummy where the slots allow it; a common rank, so that timings are typical."""


def build_dummies(stacks: Mapping[str, SlotStack], count: int) -> dict[str, PreparedAdapter]:
    """Build adapters named `warmup_1` to `warmup_<count>` for every module; they share tensors."""
    contents = {}
    for path, stack in stacks.items():
        weights = stack.weights
        rank = min(DUMMY_RANK, weights.max_rank)
        lora_a = torch.zeros(rank, weights.in_features, dtype=weights.dtype)
        slices = tuple(
            (lora_a, torch.zeros(out, rank, dtype=weights.dtype)) for out in weights.out_features
        )
        contents[path] = SlotContent(slices=slices)
    dummy = make_prepared(contents)
    return {f"warmup_{index}": dummy for index in range(1, count + 1)}
