"""Two products for each segment, written into y: for the long segments of a prefill.

Letters: `T` tokens, `S` entries of a segment, `P` slices, `I` in, `O` out, `r` a true rank,
`C` ranks of all slices of a slot, `r * P`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from lora_kernels._aten.rows import take_rows

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.routing import Routing
    from lora_kernels.weights import StackedWeights


def slice_blocks(weights: StackedWeights) -> Tensor:
    """Return 1 where a column of the output belongs to the slice, else 0: `[P, sum O_p]`."""
    shape = (weights.num_slices, weights.total_out_features)
    blocks_PO = torch.zeros(shape, dtype=weights.dtype, device=weights.device)
    for p, (low, high) in enumerate(weights.out_ranges):
        blocks_PO[p, low:high] = 1
    return blocks_PO


def add_segments_(
    y_TO: Tensor,
    x_TI: Tensor,
    weights: StackedWeights,
    routing: Routing,
    blocks_PO: Tensor | None,
) -> None:
    """Add the LoRA part of each segment.

    Args:
        y_TO: written in place, in the dtype of the products.
        x_TI: in the dtype of the products.
        weights: in the dtype of the products.
        routing: no token has two entries.
        blocks_PO: `slice_blocks`, or `None` for a single slice.
    """
    for segment in routing.segments:
        ranks = weights.slot_ranks[segment.slot]
        if segment.end == segment.start or not any(ranks):
            continue
        x_SI = take_rows(x_TI, segment, routing)
        y_SO = take_rows(y_TO, segment, routing)
        scales_S1 = None
        if not routing.has_unit_scales:
            scales_S1 = routing.scales[segment.start : segment.end, None]
        if min(ranks) == max(ranks):
            _add_blocks_(y_SO, x_SI, weights, segment.slot, scales_S1, blocks_PO)
        else:
            _add_slices_(y_SO, x_SI, weights, segment.slot, scales_S1)
        if segment.first_token is None:
            y_TO.index_copy_(0, routing.token_idx[segment.start : segment.end], y_SO)


def shrink_slices(x_SI: Tensor, weights: StackedWeights, slot: int) -> list[Tensor]:
    """Multiply with one slot's A: for each slice `[S, r]`, in the dtype of x."""
    factors = [weights.lora_a[p][slot, :rank] for p, rank in enumerate(weights.slot_ranks[slot])]
    return [torch.mm(x_SI, a_rI.to(x_SI.dtype).t()) for a_rI in factors]


def _add_blocks_(  # noqa: PLR0917 - the operator's arguments, and what is known of the segment
    y_SO: Tensor,
    x_SI: Tensor,
    weights: StackedWeights,
    slot: int,
    scales_S1: Tensor | None,
    blocks_PO: Tensor | None,
) -> None:
    """Add the part of a slot whose slices have one rank, B as a block diagonal matrix.

    A product that writes some columns of y only would go through a copy of them in oneDNN.
    """
    a_CI, b_CO = weights.slot_factors(slot, weights.slot_ranks[slot][0])
    v_SC = linear(x_SI, a_CI)
    if scales_S1 is not None:
        v_SC.mul_(scales_S1)
    if blocks_PO is not None:
        b_CO = b_CO.unsqueeze(1).mul(blocks_PO).flatten(0, 1)  # [r, P, O] -> [r * P, O]
    y_SO.addmm_(v_SC, b_CO)


def _add_slices_(
    y_SO: Tensor, x_SI: Tensor, weights: StackedWeights, slot: int, scales_S1: Tensor | None
) -> None:
    for p, v_Sr in enumerate(shrink_slices(x_SI, weights, slot)):
        rank = v_Sr.shape[1]
        if rank:
            if scales_S1 is not None:
                v_Sr.mul_(scales_S1)
            low, high = weights.out_ranges[p]
            y_SO[:, low:high].addmm_(v_Sr, weights.b_storage[slot, :rank, low:high])
