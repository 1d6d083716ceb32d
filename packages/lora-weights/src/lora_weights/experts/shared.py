"""Shared outer factors: A of w1 and w3 and B of w2, the ones towards the hidden state, kept once.

Shapes: `X` experts.
"""

from __future__ import annotations

from lora_weights.experts.convert import expand_shared, share_factor
from lora_weights.experts.parts import ExpertPair, ExpertPart


def has_shared_outer(part: ExpertPart) -> bool:
    """Return whether every outer factor is kept once, with a leading dimension of 1."""
    outer = [pair.lora_a for pair in (part.w1, part.w3) if pair is not None]
    if part.w2 is not None:
        outer.append(part.w2.lora_b)
    return bool(outer) and all(factor.shape[0] == 1 for factor in outer)


def share_outer(part: ExpertPart) -> ExpertPart:
    """Return a part with its outer factors kept once: the inverse of `expand_outer`.

    Raises:
        ValueError: the experts differ in an outer factor.
    """
    return part.map_pairs(_share)


def _share(name: str, pair: ExpertPair) -> ExpertPair:
    """Return a pair with its outer factor kept once: B of w2, A of the others."""
    outer = share_factor(pair.lora_b if name == "w2" else pair.lora_a)
    if outer is None:
        factor = "lora_B" if name == "w2" else "lora_A"
        raise ValueError(f"{factor} of {name} differs between experts, expected one for all")
    if name == "w2":
        return ExpertPair(lora_a=pair.lora_a, lora_b=outer)
    return ExpertPair(lora_a=outer, lora_b=pair.lora_b)


def expand_outer(part: ExpertPart, num_experts: int) -> ExpertPart:
    """Return a part whose factors all have `X` experts; shared ones become stride-0 views.

    Raises:
        ValueError: a factor has neither one expert nor `X` of them.
    """
    return part.map_pairs(lambda _, pair: expand_shared(pair, num_experts))
