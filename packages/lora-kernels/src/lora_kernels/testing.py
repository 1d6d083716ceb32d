"""Tolerances, workloads and filled slots: for this package's tests and for those of its users.

Letters: `T` tokens, `N` slots, `I` in, `O` out, `P` slices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from lora_kernels.weights import StackedWeights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_ZIPF_EXPONENT = 1.5


class Popularity(StrEnum):
    """How the tokens of a step spread over the adapters."""

    DISTINCT = "distinct"
    """As many adapters as possible: token `t` uses slot `t % N`."""

    UNIFORM = "uniform"
    """Each token draws its slot with equal chances."""

    ZIPF = "zipf"
    """Slot `s` is drawn with a chance proportional to `1 / (s + 1) ** 1.5`."""

    IDENTICAL = "identical"
    """All tokens use slot 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Keyword arguments of `torch.testing.assert_close`."""

    atol: float
    rtol: float


def tolerance(dtype: torch.dtype, *, reduction: int) -> Tolerance:
    """Return what a result in `dtype` may differ from the exact one, for data of unit scale.

    A 16-bit result is rounded up to four times (base, intermediate, delta, sum), each by at most
    half a unit in the last place of a value of about 4, the largest of thousands of normal draws:
    `8 * eps` in total. Float32 sums of `reduction` products add an error that grows with the
    square root of their number; a factor of 4 covers the largest of thousands of elements.

    Args:
        dtype: the lowest precision among x, weights and y.
        reduction: the longest sum, `I` or the rank.
    """
    eps = torch.finfo(dtype).eps
    sums = 4 * torch.finfo(torch.float32).eps * math.sqrt(reduction)
    if dtype == torch.float32:
        return Tolerance(atol=4 * eps + sums, rtol=4 * eps)
    return Tolerance(atol=2 * eps + sums, rtol=2 * eps)


def slots_by_popularity(
    popularity: Popularity, *, num_tokens: int, num_slots: int, generator: torch.Generator
) -> list[int]:
    """Return a slot for each token.

    Args:
        popularity: the distribution.
        num_tokens: `T`.
        num_slots: `N`.
        generator: source of the draws, on the CPU.
    """
    if popularity is Popularity.DISTINCT:
        return [token % num_slots for token in range(num_tokens)]
    if popularity is Popularity.IDENTICAL or num_tokens == 0:
        return [0] * num_tokens
    exponent = _ZIPF_EXPONENT if popularity is Popularity.ZIPF else 0.0
    chances = torch.arange(1, num_slots + 1, dtype=torch.float64) ** -exponent
    drawn = torch.multinomial(chances, num_tokens, replacement=True, generator=generator)
    return [int(slot) for slot in drawn]


def random_pair(
    rank: int, in_features: int, out_features: int, *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw `(lora_a [r, I], lora_b [O, r])` in float32 whose delta of unit data has unit scale."""
    lora_a = torch.randn(rank, in_features, generator=generator) / math.sqrt(in_features)
    lora_b = torch.randn(out_features, rank, generator=generator) / math.sqrt(rank)
    return lora_a, lora_b


def random_weights(
    ranks: Sequence[int | Sequence[int]],
    *,
    max_rank: int,
    in_features: int,
    out_features: Sequence[int],
    dtype: torch.dtype,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> StackedWeights:
    """Allocate slots and fill them with random adapters.

    Args:
        ranks: for each slot the rank of all its slices, or a rank for each slice; 0 is absent.
        max_rank: `R`.
        in_features: `I`.
        out_features: `O_p` of each slice.
        dtype: of the slots.
        generator: source of the draws, on the CPU.
        device: of the slots.
    """
    weights = StackedWeights.allocate(
        num_slots=len(ranks),
        max_rank=max_rank,
        in_features=in_features,
        out_features=out_features,
        dtype=dtype,
        device=device,
    )
    for slot, given in enumerate(ranks):
        by_slice = [given] * len(out_features) if isinstance(given, int) else given
        slices = [
            random_pair(rank, in_features, out, generator=generator) if rank else None
            for rank, out in zip(by_slice, out_features, strict=True)
        ]
        weights.write_slot(slot, slices)
    return weights
