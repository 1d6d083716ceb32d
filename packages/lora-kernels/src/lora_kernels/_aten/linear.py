"""shrink, expand_ and apply_lora_ as a few matrix products of torch.

`apply_lora_` works in bfloat16 when x and weights are bfloat16 (products accumulate in float32;
the rank-wide intermediate and, with bags, the delta are rounded to bfloat16), else in float32.
`shrink` and `expand_` alone work in float32.

Letters: `T` tokens, `E` entries, `R` max rank, `P` slices, `U` tokens with an entry, `S` entries
of a segment, `C` chunks of the output, `F` elements of bags, `I` in, `O` out, `r` a true rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from lora_kernels._aten.dense import add_dense_
from lora_kernels._aten.plan import Way, compute_dtype, known_plan, plan_apply
from lora_kernels._aten.rows import put_touched_rows_, take_rows, touched_rows
from lora_kernels._aten.segments import add_segments_, shrink_slices

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels._aten.bags import Bags
    from lora_kernels._aten.plan import Plan
    from lora_kernels.routing import Routing
    from lora_kernels.weights import StackedWeights


def apply_lora_(y_TO: Tensor, x_TI: Tensor, weights: StackedWeights, routing: Routing) -> Tensor:
    """See `lora_kernels.apply_lora_`; gains and biases are not added here."""
    return _run_(plan_apply(y_TO, x_TI, weights, routing), y_TO, x_TI, weights, routing)


def apply_lora_again_(
    y_TO: Tensor, x_TI: Tensor, weights: StackedWeights, routing: Routing
) -> bool:
    """Do it if this step did it before with tensors like these, whose checks need no repetition.

    A module of a decode step takes some 100 us, of which the checks would be a good part.

    Returns:
        Whether it was done; `False` where anything differs, or a slot has a gain or a bias.
    """
    if torch.is_grad_enabled() or weights.affine is not None:
        return False
    plan = known_plan(y_TO, x_TI, weights, routing)
    if plan is None:
        return False
    _run_(plan, y_TO, x_TI, weights, routing)
    return True


def _run_(
    plan: Plan, y_TO: Tensor, x_TI: Tensor, weights: StackedWeights, routing: Routing
) -> Tensor:
    if plan.way is Way.WIDE:
        return expand_(y_TO, shrink(x_TI, weights, routing), weights, routing)
    dtype = compute_dtype(x_TI.dtype, weights.dtype)
    if x_TI.dtype != dtype:
        x_TI = x_TI.to(dtype)
    if plan.bags is not None and plan.take is not None:
        v_F = _shrink_factors(x_TI, weights, routing, plan).take(plan.take)
        if plan.scales is not None:
            v_F.mul_(plan.scales)
        return add_bags_(y_TO, v_F, weights, routing, plan.bags)
    if plan.dense is not None:
        rows_UO = touched_rows(y_TO, routing)
        add_dense_(rows_UO, touched_rows(x_TI, routing), weights, plan.dense)
        return put_touched_rows_(y_TO, rows_UO, routing)
    if plan.way is Way.SEGMENTS:
        add_segments_(y_TO, x_TI, weights, routing, plan.blocks)
    return y_TO


def shrink(x_TI: Tensor, weights: StackedWeights, routing: Routing) -> Tensor:
    """See `lora_kernels.shrink`; float32 throughout."""
    shape = (weights.num_slices, routing.num_entries, weights.max_rank)
    v_PER = torch.zeros(shape, dtype=torch.float32, device=x_TI.device)
    for segment in routing.segments:
        x_SI = take_rows(x_TI, segment, routing).float()
        for p, v_Sr in enumerate(shrink_slices(x_SI, weights, segment.slot)):
            v_PER[p, segment.start : segment.end, : v_Sr.shape[1]] = v_Sr
    return v_PER


def expand_(y_TO: Tensor, v_PER: Tensor, weights: StackedWeights, routing: Routing) -> Tensor:
    """See `lora_kernels.expand_`; float32 sums over all entries, then one rounding."""
    rows_UO = touched_rows(y_TO, routing)
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
    return put_touched_rows_(y_TO, rows_UO, routing)


def add_bags_(
    y_TO: Tensor, v_F: Tensor, weights: StackedWeights, routing: Routing, bags: Bags
) -> Tensor:
    """Add to each touched token the sum of its rows of B, weighted by its factors `v`."""
    # Arguments: scale_grad_by_freq=False, mode=0 (sum), sparse=False.
    pieces = weights.b_pieces
    delta = torch.embedding_bag(pieces, bags.pieces, bags.starts, False, 0, False, v_F)[0]
    rows_UO = touched_rows(y_TO, routing)
    rows_UO.add_(delta.view(rows_UO.shape))  # [U * C, chunk] -> [U, O]
    return put_touched_rows_(y_TO, rows_UO, routing)


def _shrink_factors(x_TI: Tensor, weights: StackedWeights, routing: Routing, plan: Plan) -> Tensor:
    """Multiply with the first ranks of every slot at once, and with the rest of some slots.

    The results lie behind each other: `[T', rank, P, N]`, then `[S, rank, P]` for each tail. Of
    the dense product, columns of slots that a token does not use are never looked at.
    """
    parts: list[Tensor] = []
    dense_rank = plan.dense_rank
    if dense_rank:
        x_UI = x_TI
        if routing.touched_range[1] < routing.num_tokens:
            x_UI = x_TI.narrow(0, *routing.touched_range)
        parts.append(linear(x_UI, weights.first_ranks(dense_rank)[0]).view(-1))
    for tail in plan.tails:
        x_SI = take_rows(x_TI, tail.segment, routing)
        a_CI = weights.slot_factors(tail.segment.slot, tail.rank)[0]
        parts.append(linear(x_SI, a_CI[dense_rank * weights.num_slices :]).view(-1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
