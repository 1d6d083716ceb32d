"""What the operators are compared with, written as an engineer would without them.

Each computes the same sums as its operator, except `dense_product`, which only does as many
multiply-adds.

Letters: `E` entries, `S` entries of a segment, `O` out, `r` rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from lora_kernels.bench.traffic import macs_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from lora_kernels.bench.steps import LinearStep, Step


def loop_over_adapters(step: LinearStep, number: int) -> None:
    """For each adapter: pick its rows, two products a slice, add them back.

    `factors` is `[S, r]`.
    """
    weights, routing = step.weights[number % len(step.weights)], step.routing
    for segment in routing.segments:
        tokens = routing.token_idx[segment.start : segment.end]
        for p, (low, high) in enumerate(weights.out_ranges):
            lora_a, lora_b = weights.lora_a[p][segment.slot], weights.lora_b[p][segment.slot]
            if step.op == "embedding_lora_":
                factors = lora_a[:, step.x[tokens]].t()
            elif step.op == "expand_":
                factors = step.v[p, segment.start : segment.end].to(step.y.dtype)
            else:
                factors = linear(step.x[tokens], lora_a)
            if step.op != "shrink":
                step.y[:, low:high].index_add_(0, tokens, linear(factors, lora_b))


def gathered_products(step: LinearStep, number: int) -> None:
    """Copy each entry's A and B, then multiply them as a batch.

    `factors` is `[E, r, 1]`, `delta` is `[E, O, 1]`.
    """
    weights, routing = step.weights[number % len(step.weights)], step.routing
    tokens, slots = routing.token_idx, routing.entry_slots
    for p, (low, high) in enumerate(weights.out_ranges):
        if step.op == "embedding_lora_":
            factors = weights.lora_a[p][slots, :, step.x[tokens]].unsqueeze(2)
        elif step.op == "expand_":
            factors = step.v[p].to(step.y.dtype).unsqueeze(2)
        else:
            factors = torch.bmm(weights.lora_a[p][slots], step.x[tokens].unsqueeze(2))
        if step.op != "shrink":
            delta = torch.bmm(weights.lora_b[p][slots], factors)
            step.y[:, low:high].index_add_(0, tokens, delta.squeeze(2))


def dense_product(step: Step, *, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Return one product with a dense matrix that has as many multiply-adds as the operator.

    The rows are the entries; the inner length is that of x, or of v for `expand_` and embeddings.
    """
    rows = step.load.entries
    inner = step.module.in_features
    if step.op in ("expand_", "embedding_lora_"):
        inner = step.load.rank
    columns = -(-macs_of(step.op, step.module, step.load) // (rows * inner))
    x = torch.ones(rows, inner, dtype=dtype, device=device)
    weight = torch.ones(columns, inner, dtype=dtype, device=device)
    return lambda: linear(x, weight)
