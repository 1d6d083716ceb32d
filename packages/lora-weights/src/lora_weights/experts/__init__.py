"""Adapters on the experts of a mixture: what a file holds, and the one form the layers take.

Shapes: `X` experts, `r` rank, `H` hidden size, `F` intermediate size, `I` in, `O` out.
"""

from __future__ import annotations

from lora_weights.experts.convert import join_w13, split_w13
from lora_weights.experts.layouts import to_parameters, to_per_expert
from lora_weights.experts.parallel import expert_range, slice_experts
from lora_weights.experts.parts import ExpertPair, ExpertPart, ExpertShape
from lora_weights.experts.sharding import shard_experts, shard_w13
from lora_weights.experts.shared import expand_outer, has_shared_outer, share_outer

__all__ = [
    "ExpertPair",
    "ExpertPart",
    "ExpertShape",
    "expand_outer",
    "expert_range",
    "has_shared_outer",
    "join_w13",
    "shard_experts",
    "shard_w13",
    "share_outer",
    "slice_experts",
    "split_w13",
    "to_parameters",
    "to_per_expert",
]
