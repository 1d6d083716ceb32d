"""DoRA: the magnitude over the norm of the updated weight, as an output gain.

    y' = (m / n) * (W x + scaling B A x) + b,    n[o] = norm(W[o, :] + scaling (B A)[o, :])

(``peft/tuners/lora/dora.py``, ``get_weight_norm``; "DoRA: Weight-Decomposed Low-Rank Adaptation",
arXiv 2402.09353.) For an embedding the rows are those of the transposed table, one for each of the
`D` outputs. Norms are taken in float32, over chunks of bounded size.

Shapes: `r` rank, `I` in, `O` out, `V` vocabulary, `D` embedding width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lora_weights.modules import LoraPair

CHUNK_ELEMENTS = 2**22
"""Values of the updated weight held at once: 16 MiB of float32."""


def compute_gain(weight: torch.Tensor, pair: LoraPair, magnitude: torch.Tensor) -> torch.Tensor:
    """Return the output gain of a module.

    Args:
        weight: the base's, `[O, I]`, or `[V, D]` for an embedding; on any device.
        pair: the module's pair, scaling in B.
        magnitude: `[O]` (`[D]`).

    Returns:
        `[O]` (`[D]`), float32, on the magnitude's device.
    """
    norms = _column_norms(weight, pair) if pair.is_embedding else _row_norms(weight, pair)
    return magnitude.float() / norms.to(magnitude.device)


def _row_norms(weight: torch.Tensor, pair: LoraPair) -> torch.Tensor:
    """Return the norm of each row of ``W + B A``, `[O]`."""
    lora_a = pair.lora_a.to(weight.device, torch.float32)
    lora_b = pair.lora_b.to(weight.device, torch.float32)
    norms = torch.empty(weight.shape[0], device=weight.device)
    step = max(1, CHUNK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        updated = torch.addmm(weight[rows].float(), lora_b[rows], lora_a)
        norms[rows] = torch.linalg.vector_norm(updated, dim=1)
    return norms


def _column_norms(weight: torch.Tensor, pair: LoraPair) -> torch.Tensor:
    """Return the norm of each column of ``E + (B A)^T``, `[D]`."""
    lora_a = pair.lora_a.to(weight.device, torch.float32)
    lora_b = pair.lora_b.to(weight.device, torch.float32)
    squares = torch.zeros(weight.shape[1], device=weight.device)
    step = max(1, CHUNK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        updated = torch.addmm(weight[rows].float(), lora_a[:, rows].T, lora_b.T)
        squares += updated.square_().sum(dim=0)
    return squares.sqrt_()
