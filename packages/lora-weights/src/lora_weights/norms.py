"""How much the parts of an adapter change, as far as the adapter alone can tell.

Shapes: `r` rank, `I` in, `O` out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lora_weights.kinds import PartKind

if TYPE_CHECKING:
    from lora_weights.modules import ModulePart


def part_norms(part: ModulePart) -> dict[PartKind, float]:
    """Return the size of what a part does, by kind.

    PAIR: Frobenius norm of ``B A``, scaling included. LORA_BIAS: norm of the bias. GAIN: norm of
    ``gain - 1``. A trained bias, a whole module, token rows and DoRA's magnitude replace what the
    base has, and which factors of an experts module belong together follows from the base's sizes:
    only a base could tell what these change.
    """
    norms = {}
    if part.pair is not None:
        norms[PartKind.PAIR] = product_norm(part.pair.lora_a, part.pair.lora_b)
    if part.lora_bias is not None:
        norms[PartKind.LORA_BIAS] = _norm(part.lora_bias)
    if part.gain is not None:
        norms[PartKind.GAIN] = _norm(part.gain.double() - 1)
    return norms


def product_norm(lora_a: torch.Tensor, lora_b: torch.Tensor) -> float:
    """Return ``||B A||_F`` without forming the product.

    ``||B A||_F^2 = tr(A^T B^T B A) = sum((B^T B) * (A A^T))``: two `[r, r]` matrices in float64.

    Args:
        lora_a: `[r, I]`, or several of them below each other, `[X, r, I]`; then the norm is that of
            all products together. A leading 1 goes with every B.
        lora_b: `[O, r]`, or `[X, O, r]` likewise.
    """
    a, b = lora_a.double(), lora_b.double()
    # Rounding can leave the square of a product that vanishes a little below zero.
    return math.sqrt(max(0.0, float(((b.mT @ b) * (a @ a.mT)).sum())))


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))
