"""Operators whose every row is computed alone: slow, but a row's bits never depend on the step.

Products of several rows go through kernels that a library picks by their number. Here each entry
is one product with a vector, always of the same shape and from a buffer of its own, in float32.

Letters: `T` tokens, `E` entries, `P` slices, `R` max rank, `I` in, `O` out, `r` a true rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_kernels.checks import check_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from lora_kernels.routing import Routing
    from lora_kernels.weights import StackedWeights


def apply_lora_(y_TO: Tensor, x_TI: Tensor, weights: StackedWeights, routing: Routing) -> Tensor:
    """See `lora_kernels.apply_lora_`; gains and biases are not applied here."""
    return expand_(y_TO, shrink(x_TI, weights, routing), weights, routing)


def embedding_lora_(
    y_TD: Tensor, token_ids_T: Tensor, weights: StackedWeights, routing: Routing
) -> Tensor:
    """See `lora_kernels.embedding_lora_`; gains and biases are not applied here."""
    ids = check_ids("embedding_lora_", token_ids_T, weights, routing).tolist()
    shape = (1, routing.num_entries, weights.max_rank)
    v_1ER = torch.zeros(shape, dtype=torch.float32, device=y_TD.device)
    for e, slot in _entries(routing):
        (rank,) = weights.slot_ranks[slot]
        v_1ER[0, e, :rank] = weights.a_storage[:rank, 0, slot, ids[e]]
    return expand_(y_TD, v_1ER, weights, routing)


def shrink(x_TI: Tensor, weights: StackedWeights, routing: Routing) -> Tensor:
    """See `lora_kernels.shrink`."""
    shape = (weights.num_slices, routing.num_entries, weights.max_rank)
    v_PER = torch.zeros(shape, dtype=torch.float32, device=x_TI.device)
    x_EI = x_TI.index_select(0, routing.token_idx).float()
    for e, slot in _entries(routing):
        x_I = x_EI[e].clone()  # always aligned alike, wherever the row stands
        for p, rank in enumerate(weights.slot_ranks[slot]):
            if rank:
                a_rI = weights.a_storage[:rank, p, slot].float()
                torch.mv(a_rI, x_I, out=v_PER[p, e, :rank])
    return v_PER


def expand_(y_TO: Tensor, v_PER: Tensor, weights: StackedWeights, routing: Routing) -> Tensor:
    """See `lora_kernels.expand_`; gains and biases are not applied here."""
    rows_UO = y_TO.index_select(0, routing.touched_tokens).float()
    delta_UO = torch.zeros_like(rows_UO)
    rows, scales = routing.entry_rows.tolist(), routing.scales.tolist()
    for e, slot in _entries(routing):
        for p, rank in enumerate(weights.slot_ranks[slot]):
            if rank:
                low, high = weights.out_ranges[p]
                b_rO = weights.b_storage[slot, :rank, low:high].float()
                part_O = torch.mv(b_rO.t(), v_PER[p, e, :rank].clone())
                delta_UO[rows[e], low:high].add_(part_O, alpha=scales[e])
    rows_UO += delta_UO
    return y_TO.index_copy_(0, routing.touched_tokens, rows_UO.to(y_TO.dtype))


def _entries(routing: Routing) -> Iterator[tuple[int, int]]:
    for segment in routing.segments:
        for e in range(segment.start, segment.end):
            yield e, segment.slot
