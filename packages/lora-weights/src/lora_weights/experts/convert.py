"""Expert layouts <-> the canonical pair: rows of one matrix, fused w13, per expert, shared factors.

Pure functions over tensors. Each has its inverse beside it; they are exact, since values are only
moved, repeated or padded with zeros.

Canonical (`ExpertPair`): A `[X or 1, r, I]`, B `[X or 1, O, r]`.
PEFT's ``target_parameters`` (``ParamWrapper.get_delta_weight``, ``peft/tuners/lora/layer.py``):
A `[X*r, I]`, the rows of one expert together; B `[O, r*X]`, the expert as the fastest index.

Shapes: `X` experts, `r` rank, `F` intermediate size, `I` in, `O` out.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch

from lora_weights.experts.parts import ExpertPair
from lora_weights.modules import LoraPair

if TYPE_CHECKING:
    from collections.abc import Sequence


def unflatten_a(lora_a: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return PEFT's `[X*r, I]` as `[X, r, I]`, a view where the strides allow one.

    Raises:
        ValueError: the rows do not divide by the experts.
    """
    _check_divides(lora_a.shape[0], num_experts, "rows of lora_A")
    return lora_a.reshape(num_experts, -1, lora_a.shape[1])


def flatten_a(lora_a: torch.Tensor) -> torch.Tensor:
    """Return `[X, r, I]` as PEFT's `[X*r, I]`."""
    return lora_a.reshape(-1, lora_a.shape[-1])


def unflatten_b(lora_b: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return PEFT's `[O, r*X]` as `[X, O, r]`, a view where the strides allow one.

    Raises:
        ValueError: the columns do not divide by the experts.
    """
    _check_divides(lora_b.shape[1], num_experts, "columns of lora_B")
    return lora_b.reshape(lora_b.shape[0], -1, num_experts).permute(2, 0, 1)


def flatten_b(lora_b: torch.Tensor) -> torch.Tensor:
    """Return `[X, O, r]` as PEFT's `[O, r*X]`."""
    return lora_b.permute(1, 2, 0).reshape(lora_b.shape[1], -1)


def reverse_pair(pair: ExpertPair) -> ExpertPair:
    """Return the pair of the transposed update, as views; it is its own inverse.

    ``(B A)^T = A^T B^T``. PEFT wraps a parameter without asking which of its dimensions is the
    input, so by release and base the stored A runs over the outputs.
    """
    return ExpertPair(lora_a=pair.lora_b.transpose(1, 2), lora_b=pair.lora_a.transpose(1, 2))


def stack_experts(pairs: Sequence[LoraPair | None]) -> ExpertPair:
    """Stack one pair an expert, with ranks padded by zeros to the largest, which is exact.

    Args:
        pairs: `X` pairs of one projection in the order of the experts; None is zero.

    Raises:
        ValueError: no pair at all, or pairs of different sizes.
    """
    found = [pair for pair in pairs if pair is not None]
    sizes = {(pair.in_features, pair.out_features) for pair in found}
    if len(sizes) != 1:
        listed = ", ".join(f"{wide} -> {high}" for wide, high in sorted(sizes)) or "none"
        raise ValueError(f"pairs of one projection have sizes {listed}, expected one size")
    width, rows = sizes.pop()
    rank = max(pair.rank for pair in found)
    dtype = reduce(torch.promote_types, (t.dtype for p in found for t in (p.lora_a, p.lora_b)))
    lora_a = torch.zeros((len(pairs), rank, width), dtype=dtype)
    lora_b = torch.zeros((len(pairs), rows, rank), dtype=dtype)
    for expert, pair in enumerate(pairs):
        if pair is not None:
            lora_a[expert, : pair.rank] = pair.lora_a
            lora_b[expert, :, : pair.rank] = pair.lora_b
    return ExpertPair(lora_a=lora_a, lora_b=lora_b)


def unstack_experts(pair: ExpertPair, num_experts: int) -> tuple[LoraPair, ...]:
    """Return one pair an expert, as views, padding included."""
    whole = expand_shared(pair, num_experts)
    return tuple(
        LoraPair(lora_a=lora_a, lora_b=lora_b)
        for lora_a, lora_b in zip(whole.lora_a, whole.lora_b, strict=True)
    )


def split_w13(pair: ExpertPair, *, is_interleaved: bool) -> tuple[ExpertPair, ExpertPair]:
    """Cut a pair of fused gate and up (B `[X, 2F, r]`) into (w1, w3), which share their A.

    Args:
        pair: the fused pair.
        is_interleaved: gate in the even rows and up in the odd ones (gpt-oss), not in halves.

    Raises:
        ValueError: the number of rows is odd.
    """
    rows = pair.lora_b.shape[1]
    _check_divides(rows, 2, "rows of fused gate and up")
    if is_interleaved:
        w1, w3 = pair.lora_b[:, 0::2], pair.lora_b[:, 1::2]
    else:
        w1, w3 = pair.lora_b[:, : rows // 2], pair.lora_b[:, rows // 2 :]
    return (
        ExpertPair(lora_a=pair.lora_a, lora_b=w1),
        ExpertPair(lora_a=pair.lora_a, lora_b=w3),
    )


def join_w13(w1: ExpertPair | None, w3: ExpertPair | None, *, is_interleaved: bool) -> ExpertPair:
    """Return one pair of fused gate and up: the inverse of `split_w13`.

    Pairs that share A keep their rank; others are put side by side, which adds up their ranks.

    Args:
        w1: gate; None is zero.
        w3: up; None is zero.
        is_interleaved: gate in the even rows and up in the odd ones, not in halves.

    Raises:
        ValueError: neither is there, or they differ in experts, width or rows.
    """
    if w1 is None or w3 is None:
        present = w1 or w3
        if present is None:
            raise ValueError("neither w1 nor w3 is there, expected at least one")
        absent = ExpertPair(lora_a=present.lora_a, lora_b=torch.zeros_like(present.lora_b))
        w1, w3 = w1 or absent, w3 or absent
    if w1.lora_b.shape[1] != w3.lora_b.shape[1] or w1.lora_a.shape[2] != w3.lora_a.shape[2]:
        sizes = [f"{pair.lora_a.shape[2]} -> {pair.lora_b.shape[1]}" for pair in (w1, w3)]
        raise ValueError(f"w1 is {sizes[0]} and w3 is {sizes[1]}, expected one size")
    if w1.lora_a is not w3.lora_a:
        w1, w3 = _side_by_side(w1, w3)
    first, second = _same_experts(w1.lora_b, w3.lora_b)
    if not is_interleaved:
        return ExpertPair(lora_a=w1.lora_a, lora_b=torch.cat([first, second], dim=1))
    rows = torch.stack([first, second], dim=2)  # [X, F, 2, r] -> [X, 2F, r]
    return ExpertPair(lora_a=w1.lora_a, lora_b=rows.flatten(1, 2))


def _side_by_side(w1: ExpertPair, w3: ExpertPair) -> tuple[ExpertPair, ExpertPair]:
    """Return pairs with one A of both ranks, each B zero where the other's rank is."""
    lora_a = torch.cat(_same_experts(w1.lora_a, w3.lora_a), dim=1)
    lora_b1 = torch.nn.functional.pad(w1.lora_b, (0, w3.rank))
    lora_b3 = torch.nn.functional.pad(w3.lora_b, (w1.rank, 0))
    return (
        ExpertPair(lora_a=lora_a, lora_b=lora_b1),
        ExpertPair(lora_a=lora_a, lora_b=lora_b3),
    )


def _same_experts(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two factors with one number of experts, repeating one that is shared."""
    num_experts = max(first.shape[0], second.shape[0])
    return expand_factor(first, num_experts), expand_factor(second, num_experts)


def expand_shared(pair: ExpertPair, num_experts: int) -> ExpertPair:
    """Return a pair with a leading dimension of `X`; shared factors become stride-0 views."""
    return ExpertPair(
        lora_a=expand_factor(pair.lora_a, num_experts),
        lora_b=expand_factor(pair.lora_b, num_experts),
    )


def expand_factor(factor: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return a factor with a leading dimension of `X`, without a copy.

    Raises:
        ValueError: it has neither one expert nor `X` of them.
    """
    if factor.shape[0] not in (1, num_experts):
        raise ValueError(f"a factor of {factor.shape[0]} experts, expected 1 or {num_experts}")
    return factor.expand(num_experts, *factor.shape[1:])


def share_factor(factor: torch.Tensor) -> torch.Tensor | None:
    """Return `[1, ...]` when all experts have the same factor, bit for bit; else None."""
    return factor[:1] if bool((factor == factor[:1]).all()) else None


def _check_divides(count: int, parts: int, what: str) -> None:
    if count % parts or not count:
        raise ValueError(f"{count} {what}, expected a multiple of {parts}")
