"""The canonical form -> the layouts of files: single experts (2D), PEFT's 3D parameters.

The inverse of reading them, for tools that convert and for tests.
Shapes: `X` experts, `r` rank, `I` in, `O` out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_weights.experts.convert import (
    expand_shared,
    flatten_a,
    flatten_b,
    join_w13,
    reverse_pair,
    unstack_experts,
)
from lora_weights.modules import LoraPair

if TYPE_CHECKING:
    from lora_weights.experts.parts import ExpertPart, ExpertShape


def to_per_expert(part: ExpertPart, shape: ExpertShape) -> dict[str, LoraPair]:
    """Return one pair an expert and projection, as views.

    Args:
        part: the experts of the whole model.
        shape: the base's experts.

    Returns:
        ``N.gate_proj``, ``N.up_proj``, ``N.down_proj`` (of those that are there) -> pair.
    """
    names = {"w1": "gate_proj" if shape.is_gated else "up_proj", "w2": "down_proj", "w3": "up_proj"}
    pairs = {"w1": part.w1, "w2": part.w2, "w3": part.w3}
    return {
        f"{expert}.{names[key]}": single
        for key, pair in pairs.items()
        if pair is not None
        for expert, single in enumerate(unstack_experts(pair, shape.num_experts))
    }


def to_parameters(
    part: ExpertPart, shape: ExpertShape, *, is_reversed: bool = False
) -> dict[str, LoraPair]:
    """Return the pairs of PEFT's ``target_parameters``, by name of the parameter.

    Gate and up become one pair: of their own rank when they share A, else of both ranks together.

    Args:
        part: the experts of the whole model.
        shape: the base's experts.
        is_reversed: give A the outputs, as PEFT up to 0.18 does for a base that is not transposed.

    Returns:
        ``gate_up_proj`` (or ``up_proj`` without a gate) and ``down_proj``, of those that are
        there: A `[X*r, I]` with the rows of one expert together, B `[O, r*X]` with the expert as
        the fastest index.
    """
    first = part.w1
    if shape.is_gated and (part.w1 is not None or part.w3 is not None):
        first = join_w13(part.w1, part.w3, is_interleaved=shape.is_interleaved)
    name = "gate_up_proj" if shape.is_gated else "up_proj"
    stored = {}
    for key, pair in ((name, first), ("down_proj", part.w2)):
        if pair is not None:
            whole = expand_shared(pair, shape.num_experts)
            whole = reverse_pair(whole) if is_reversed else whole
            lora_a, lora_b = flatten_a(whole.lora_a), flatten_b(whole.lora_b)
            stored[key] = LoraPair(lora_a=lora_a, lora_b=lora_b)
    return stored
