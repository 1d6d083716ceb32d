"""shrink, expand_ and apply_lora_ as a few matrix products of torch.

`apply_lora_` works in bfloat16 when x and weights are bfloat16 (products accumulate in float32;
the rank-wide intermediate and, with bags, the delta are rounded to bfloat16), else in float32.
`shrink` and `expand_` alone work in float32.

Letters: `T` tokens, `E` entries, `N` slots, `R` max rank, `P` slices, `U` tokens with an entry,
`S` entries of a segment, `C` chunks of the output, `F` elements of bags, `I` in, `O` out, `r` a
true rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_kernels._aten.plan import Way, compute_dtype, plan_apply

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels._aten.bags import Bags
    from lora_kernels._aten.plan import Plan
    from lora_kernels.routing import Routing, Segment
    from lora_kernels.weights import StackedWeights


def apply_lora_(y_TO: Tensor, x_TI: Tensor, weights: StackedWeights, routing: Routing) -> Tensor:
    """See `lora_kernels.apply_lora_`."""
    plan = plan_apply(x_TI.dtype, y_TO.dtype, weights, routing)
    if plan.way is Way.WIDE:
        return expand_(y_TO, shrink(x_TI, weights, routing), weights, routing)
    dtype = compute_dtype(x_TI.dtype, weights.dtype)
    if x_TI.dtype != dtype:
        x_TI = x_TI.to(dtype)
    if plan.way is Way.SEGMENTS:
        return _apply_segments_(y_TO, x_TI, weights, routing)
    if plan.bags is None or plan.take is None:
        return y_TO
    v_F = _shrink_factors(x_TI, weights, routing, plan).take(plan.take)
    if plan.scales is not None:
        v_F.mul_(plan.scales)
    return add_bags_(y_TO, v_F, weights, routing, plan.bags)


def shrink(x_TI: Tensor, weights: StackedWeights, routing: Routing) -> Tensor:
    """See `lora_kernels.shrink`; float32 throughout."""
    shape = (weights.num_slices, routing.num_entries, weights.max_rank)
    v_PER = torch.zeros(shape, dtype=torch.float32, device=x_TI.device)
    for segment in routing.segments:
        x_SI = _take_rows(x_TI, segment, routing).float()
        for p, v_Sr in enumerate(_shrink_segment(x_SI, weights, segment.slot)):
            v_PER[p, segment.start : segment.end, : v_Sr.shape[1]] = v_Sr
    return v_PER


def expand_(y_TO: Tensor, v_PER: Tensor, weights: StackedWeights, routing: Routing) -> Tensor:
    """See `lora_kernels.expand_`; float32 sums over all entries, then one rounding."""
    rows_UO = _touched_rows(y_TO, routing)
    sums_UO = rows_UO.float()
    for segment in routing.segments:
        entries = slice(segment.start, segment.end)
        v_PSR = v_PER[:, entries]
        if not routing.has_unit_scales:
            v_PSR = v_PSR * routing.scales[entries, None]
        for p, rank in enumerate(weights.slot_ranks[segment.slot]):
            if rank:
                low, high = weights.out_ranges[p]
                b_rO = weights.b_storage[segment.slot, :rank, low:high].float()
                part_SO = v_PSR[p, :, :rank] @ b_rO
                sums_UO[:, low:high].index_add_(0, routing.entry_rows[entries], part_SO)
    if sums_UO is not rows_UO:
        rows_UO.copy_(sums_UO)
    return _put_touched_rows_(y_TO, rows_UO, routing)


def add_bags_(
    y_TO: Tensor, v_F: Tensor, weights: StackedWeights, routing: Routing, bags: Bags
) -> Tensor:
    """Add to each touched token the sum of its rows of B, weighted by its factors `v`."""
    b_pieces = weights.b_storage.view(-1, weights.chunk)
    # Arguments: scale_grad_by_freq=False, mode=0 (sum), sparse=False.
    delta = torch.embedding_bag(b_pieces, bags.pieces, bags.starts, False, 0, False, v_F)[0]
    rows_UO = _touched_rows(y_TO, routing)
    rows_UO.add_(delta.view(rows_UO.shape))  # [U * C, chunk] -> [U, O]
    return _put_touched_rows_(y_TO, rows_UO, routing)


def _shrink_factors(x_TI: Tensor, weights: StackedWeights, routing: Routing, plan: Plan) -> Tensor:
    """Multiply with the first ranks of every slot at once, and with the rest of some slots.

    Of the dense product, columns of slots that a token does not use are never looked at.
    """
    a_RPNI, dense_rank = weights.a_storage, plan.dense_rank
    x_UI = x_TI.narrow(0, *routing.touched_range)
    dense_CI = a_RPNI[:dense_rank].flatten(0, 2)
    if not plan.tails:
        return torch.mm(x_UI, dense_CI.t())
    factors = x_TI.new_empty(plan.num_factors)
    if dense_rank:
        out = factors[: plan.tails[0].offset].view(x_UI.shape[0], -1)
        torch.mm(x_UI, dense_CI.t(), out=out)
    for tail in plan.tails:
        x_SI = _take_rows(x_TI, tail.segment, routing)
        a_CI = a_RPNI[dense_rank : tail.rank, :, tail.segment.slot].flatten(0, 1)
        size = x_SI.shape[0] * a_CI.shape[0]
        out = factors[tail.offset : tail.offset + size].view(x_SI.shape[0], -1)
        torch.mm(x_SI, a_CI.t(), out=out)
    return factors


def _apply_segments_(
    y_TO: Tensor, x_TI: Tensor, weights: StackedWeights, routing: Routing
) -> Tensor:
    for segment in routing.segments:
        v_by_slice = _shrink_segment(_take_rows(x_TI, segment, routing), weights, segment.slot)
        y_SO = _take_rows(y_TO, segment, routing)
        for p, v_Sr in enumerate(v_by_slice):
            rank = v_Sr.shape[1]
            if rank:
                if not routing.has_unit_scales:
                    v_Sr.mul_(routing.scales[segment.start : segment.end, None])
                low, high = weights.out_ranges[p]
                b_rO = weights.b_storage[segment.slot, :rank, low:high]
                y_SO[:, low:high].addmm_(v_Sr, b_rO)
        if segment.first_token is None:
            y_TO.index_copy_(0, routing.token_idx[segment.start : segment.end], y_SO)
    return y_TO


def _shrink_segment(x_SI: Tensor, weights: StackedWeights, slot: int) -> list[Tensor]:
    """Multiply with one slot's A: for each slice `[S, r]`, in the dtype of x."""
    ranks = weights.slot_ranks[slot]
    if min(ranks) < max(ranks) or len(ranks) == 1:
        factors = [weights.lora_a[p][slot, :rank] for p, rank in enumerate(ranks)]
        return [torch.mm(x_SI, a_rI.to(x_SI.dtype).t()) for a_rI in factors]
    a_CI = weights.a_storage[: ranks[0], :, slot].flatten(0, 1)  # [r, P, I] -> [r * P, I]
    v_SC = torch.mm(x_SI, a_CI.to(x_SI.dtype).t())
    # all slices absent: r is 0, and the rows cannot be left to view() to find out
    v_SrP = v_SC.view(x_SI.shape[0], ranks[0], len(ranks))
    return list(v_SrP.permute(2, 0, 1).contiguous())


def _take_rows(rows_TX: Tensor, segment: Segment, routing: Routing) -> Tensor:
    """Rows of a segment's tokens: a view where they are a run, else a copy."""
    if segment.first_token is not None:
        return rows_TX.narrow(0, segment.first_token, segment.end - segment.start)
    return rows_TX.index_select(0, routing.token_idx[segment.start : segment.end])


def _touched_rows(y_TO: Tensor, routing: Routing) -> Tensor:
    """Rows of the tokens with an entry: a view where they are a run, else a copy."""
    if routing.is_touched_run:
        return y_TO.narrow(0, *routing.touched_range)
    return y_TO.index_select(0, routing.touched_tokens)


def _put_touched_rows_(y_TO: Tensor, rows_UO: Tensor, routing: Routing) -> Tensor:
    if not routing.is_touched_run:
        y_TO.index_copy_(0, routing.touched_tokens, rows_UO)
    return y_TO
