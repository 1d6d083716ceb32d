"""Adapters of zeros for warm-up and profiling: they cost what real ones cost and change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_layers.content import ExpertContent, SlotContent, make_prepared
from lora_layers.wrappers import ExpertStack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lora_kernels import ExpertWeights, StackedWeights
    from lora_layers.content import Content, PreparedAdapter, Slices
    from lora_layers.wrappers import SlotStack

DUMMY_RANK = 8
"""Rank of a dummy where the slots allow it; a common rank, so that timings are typical."""


def build_dummies(
    stacks: Mapping[str, SlotStack | ExpertStack], count: int
) -> dict[str, PreparedAdapter]:
    """Build adapters named `warmup_1` to `warmup_<count>` for every module; they share tensors."""
    contents: dict[str, Content] = {}
    for path, stack in stacks.items():
        if isinstance(stack, ExpertStack):
            (w2,) = _expert_zeros(stack.w2)
            contents[path] = ExpertContent(w13=_expert_zeros(stack.w13), w2=w2)
        else:
            contents[path] = SlotContent(slices=_zeros(stack.weights))
    dummy = make_prepared(contents)
    return {f"warmup_{index}": dummy for index in range(1, count + 1)}


def _zeros(weights: StackedWeights) -> Slices:
    rank = min(DUMMY_RANK, weights.max_rank)
    lora_a = torch.zeros(rank, weights.in_features, dtype=weights.dtype)
    return tuple(
        (lora_a, torch.zeros(out, rank, dtype=weights.dtype)) for out in weights.out_features
    )


def _expert_zeros(weights: ExpertWeights) -> Slices:
    rank = min(DUMMY_RANK, weights.max_rank)
    a_shape = (weights.a_experts, rank, weights.in_features)
    lora_a = torch.zeros(a_shape, dtype=weights.dtype)
    return tuple(
        (lora_a, torch.zeros(weights.b_experts, out, rank, dtype=weights.dtype))
        for out in weights.out_features
    )
