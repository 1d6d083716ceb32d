"""shrink, expand_ and apply_lora_ with one matrix product a segment.

Letters: `T` tokens, `E` entries, `R` max rank, `I` in, `O` out, `P` slices, `S` entries of a segment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.routing import Routing, Segment
    from lora_kernels.weights import StackedWeights


def shrink(x_TI: Tensor, weights: StackedWeights, routing: Routing) -> Tensor:
    """See `lora_kernels.shrink`; float32 throughout."""
    shape = (weights.num_slices, routing.num_entries, weights.max_rank)
    v_PER = torch.zeros(shape, dtype=torch.float32, device=x_TI.device)
    for segment in routing.segments:
        x_SI = take_rows(x_TI, segment, routing).float()
        for p, rank in enumerate(weights.slot_ranks[segment.slot]):
            if rank:
                a_rI = weights.lora_a[p][segment.slot, :rank].float()
                torch.mm(x_SI, a_rI.t(), out=v_PER[p, segment.start : segment.end, :rank])
    return v_PER


def expand_(y_TO: Tensor, v_PER: Tensor, weights: StackedWeights, routing: Routing) -> Tensor:
    """See `lora_kernels.expand_`; one float32 sum over all entries, then one rounding."""
    touched = routing.touched_tokens
    delta_TO = torch.zeros(y_TO.shape, dtype=torch.float32, device=y_TO.device)
    for segment in routing.segments:
        rows = slice(segment.start, segment.end)
        scales_S1 = routing.scales[rows, None]
        for p, rank in enumerate(weights.slot_ranks[segment.slot]):
            if rank:
                low, high = weights.out_ranges[p]
                b_rO = weights.lora_b[p][segment.slot, :, :rank].float().t()
                part_SO = (v_PER[p, rows, :rank] * scales_S1) @ b_rO
                delta_TO[:, low:high].index_add_(0, routing.token_idx[rows], part_SO)
    y_UO = y_TO[touched].float().add_(delta_TO[touched])
    return y_TO.index_copy_(0, touched, y_UO.to(y_TO.dtype))


def apply_lora_(y_TO: Tensor, x_TI: Tensor, weights: StackedWeights, routing: Routing) -> Tensor:
    """See `lora_kernels.apply_lora_`."""
    return expand_(y_TO, shrink(x_TI, weights, routing), weights, routing)


def take_rows(x_TI: Tensor, segment: Segment, routing: Routing) -> Tensor:
    """Rows of a segment's tokens: a view where they are a run, else a copy."""
    if segment.first_token is not None:
        return x_TI.narrow(0, segment.first_token, segment.end - segment.start)
    return x_TI.index_select(0, routing.token_idx[segment.start : segment.end])
