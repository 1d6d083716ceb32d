"""How one step runs through one kind of module: which products, and the index tensors they need.

A plan depends on the routing, on the true ranks of its slots and on the module's sizes, not on
the numbers in the weights: it is made once a step and kept on the routing for the next layers.

Letters: `T` tokens, `E` entries, `G` segments, `N` slots, `P` slices, `I` in, `O` out,
`F` elements of bags.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch

from lora_kernels._aten.bags import bags_of
from lora_kernels._aten.costs import costs_of
from lora_kernels._aten.dense import plan_dense
from lora_kernels._aten.segments import slice_blocks

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels._aten.bags import Bags, SegmentRanks
    from lora_kernels._aten.costs import Costs
    from lora_kernels._aten.dense import DensePlan
    from lora_kernels.routing import Routing, Segment
    from lora_kernels.weights import StackedWeights


class Way(Enum):
    """The ways through `apply_lora_`."""

    BAGS = auto()
    """Few products with A, then each token sums its own rows of B."""

    DENSE = auto()
    """A product with all slots' A, a mask, and a product with all slots' B, written into y."""

    SEGMENTS = auto()
    """A product with A and one with B for each segment, written into y."""

    WIDE = auto()
    """As `SEGMENTS`, through float32 sums: dtypes differ, or tokens repeat in a long step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """A segment whose rank exceeds the dense one: the remaining ranks are a product of its own."""

    segment: Segment

    rank: int
    """The largest true rank of its slices: the product has `rank - dense_rank` ranks."""

    offset: int
    """Where its result, `[S, rank - dense_rank, P]`, begins among the factors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `apply_lora_` does for one kind of module in one step."""

    way: Way

    x_shape: torch.Size

    y_shape: torch.Size

    device: torch.device

    dense_rank: int = 0
    """So many ranks of all slots are one product over all touched tokens, `[T', rank, P, N]`."""

    tails: tuple[Tail, ...] = ()

    bags: Bags | None = None
    """Left out unless the way is `BAGS` and some slice is present."""

    take: Tensor | None = None
    """Which factor each element of the bags has, `[F]` int64."""

    scales: Tensor | None = None
    """Scale of each element, `[F]` float32; left out when all are 1."""

    dense: DensePlan | None = None
    """Set if the way is `DENSE`."""

    blocks: Tensor | None = None
    """`slice_blocks` if the way is `SEGMENTS` and there are several slices."""


def plan_apply(y: Tensor, x: Tensor, weights: StackedWeights, routing: Routing) -> Plan:
    """Return the plan of this step for modules like `weights`; made at the first call."""
    plan = known_plan(y, x, weights, routing)
    if plan is None:
        plan = routing.derived[x.dtype, y.dtype, weights.kind] = _make_plan(y, x, weights, routing)
    return plan


def known_plan(y: Tensor, x: Tensor, weights: StackedWeights, routing: Routing) -> Plan | None:
    """Return the plan of an earlier call in this step, for tensors like these, if there is one."""
    plan: Plan | None = routing.derived.get((x.dtype, y.dtype, weights.kind))
    if plan is None or x.shape != plan.x_shape or y.shape != plan.y_shape:
        return None
    if x.device != plan.device or y.device != plan.device:
        return None
    if plan.way is Way.DENSE and not weights.bounds.are_moderate():
        return None
    return plan


def _make_plan(y: Tensor, x: Tensor, weights: StackedWeights, routing: Routing) -> Plan:
    ranks = tuple([weights.slot_ranks[segment.slot] for segment in routing.segments])
    way, dense_rank = _choose(x.dtype, y.dtype, weights, routing, ranks)
    plan = Plan(way=way, x_shape=x.shape, y_shape=y.shape, device=weights.device)
    if not any(map(any, ranks)):
        return replace(plan, way=Way.SEGMENTS)
    if way is Way.BAGS:
        return _plan_bags(plan, dense_rank, weights, routing, ranks)
    if way is Way.DENSE:
        dtype = compute_dtype(x.dtype, weights.dtype)
        return replace(plan, dense=plan_dense(max(map(max, ranks)), weights, routing, dtype))
    if way is Way.SEGMENTS and weights.num_slices > 1:
        return replace(plan, blocks=slice_blocks(weights))
    return plan


def compute_dtype(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the products: bfloat16 when both are, else float32.

    Products of float16 overflow at 65504 where the result would be finite, so it is widened too.
    """
    both_bfloat16 = x_dtype == weight_dtype == torch.bfloat16
    return torch.bfloat16 if both_bfloat16 else torch.float32


def _choose(
    x_dtype: torch.dtype,
    y_dtype: torch.dtype,
    weights: StackedWeights,
    routing: Routing,
    ranks: SegmentRanks,
) -> tuple[Way, int]:
    """Return the cheapest way, and its dense rank if it is `BAGS`."""
    compute = compute_dtype(x_dtype, weights.dtype)
    # bfloat16 products take pairs of columns: with an odd number the last is paired with the next
    # row's first, times zero, and one token's NaN would reach another's row.
    has_odd_pair = compute == torch.bfloat16 and weights.in_features % 2 == 1
    if compute != weights.dtype or has_odd_pair:
        return Way.WIDE, 0
    costs = costs_of(compute)
    candidates = {0, *map(max, ranks)}
    shrinks = {rank: _shrink_cost(rank, costs, weights, routing, ranks) for rank in candidates}
    dense_rank = min(candidates, key=lambda rank: (shrinks[rank], rank))
    by_way = {Way.BAGS: shrinks[dense_rank] + _bag_cost(costs, weights, routing, ranks)}
    if y_dtype == compute and weights.bounds.are_moderate():
        by_way[Way.DENSE] = _dense_cost(max(candidates), costs, weights, routing)
    can_write_through = y_dtype == compute and not routing.has_repeated_tokens
    products = Way.SEGMENTS if can_write_through else Way.WIDE
    by_way[products] = shrinks[0] + _segment_cost(costs, weights, routing, ranks)
    return min(by_way, key=by_way.__getitem__), dense_rank


def _shrink_cost(
    dense_rank: int,
    costs: Costs,
    weights: StackedWeights,
    routing: Routing,
    ranks: SegmentRanks,
) -> float:
    num_slices, in_features = weights.num_slices, weights.in_features
    total = 0.0
    if dense_rank:
        num_ranks = dense_rank * num_slices * weights.num_slots
        total += costs.shrink(routing.touched_range[1], num_ranks, in_features)
    for segment, by_slice in zip(routing.segments, ranks, strict=True):
        rest = max(by_slice) - dense_rank
        if rest > 0:
            total += costs.shrink(segment.end - segment.start, rest * num_slices, in_features)
    return total


def _bag_cost(
    costs: Costs, weights: StackedWeights, routing: Routing, ranks: SegmentRanks
) -> float:
    total = costs.bag + costs.bag_out * routing.num_entries * weights.total_out_features / 1e3
    for segment, by_slice in zip(routing.segments, ranks, strict=True):
        rows = segment.end - segment.start
        for rank, out in zip(by_slice, weights.out_features, strict=True):
            total += costs.in_bag(rows, rank, out, weights.chunk)
    return total


def _dense_cost(rank: int, costs: Costs, weights: StackedWeights, routing: Routing) -> float:
    rows, num_slices = routing.touched_tokens.shape[0], weights.num_slices
    num_ranks = rank * num_slices * weights.num_slots
    total = costs.other_code + costs.multiply(rows * num_ranks)
    total += costs.shrink(rows, num_ranks, weights.in_features)
    if num_slices > 1:
        total += costs.multiply(num_ranks * weights.total_out_features)
    return total + costs.expand(rows, num_ranks, weights.total_out_features)


def _segment_cost(
    costs: Costs, weights: StackedWeights, routing: Routing, ranks: SegmentRanks
) -> float:
    total, outs = 0.0, weights.total_out_features
    for segment, by_slice in zip(routing.segments, ranks, strict=True):
        if any(by_slice):
            num_ranks = sum(by_slice)
            total += costs.segment
            total += costs.expand(segment.end - segment.start, num_ranks, outs)
            if len(by_slice) > 1:
                total += costs.multiply(num_ranks * outs)
    return total


def _plan_bags(
    plan: Plan, dense_rank: int, weights: StackedWeights, routing: Routing, ranks: SegmentRanks
) -> Plan:
    num_slices = weights.num_slices
    offset = routing.touched_range[1] * dense_rank * num_slices * weights.num_slots
    tails = []
    for segment, rank in zip(routing.segments, map(max, ranks), strict=True):
        if rank > dense_rank and segment.end > segment.start:
            tails.append(Tail(segment=segment, rank=rank, offset=offset))
            offset += (segment.end - segment.start) * (rank - dense_rank) * num_slices
    bags = bags_of(weights, routing, ranks)
    place = _place_dense(dense_rank, bags, weights, routing)
    if tails:
        in_tail = _place_in_tails(dense_rank, tails, bags, num_slices, routing)
        place = torch.where(bags.rank < dense_rank, place, in_tail)
    return replace(
        plan,
        dense_rank=dense_rank,
        tails=tuple(tails),
        bags=bags,
        take=place,
        scales=None if routing.has_unit_scales else routing.scales[bags.entry],
    )


def _place_dense(dense_rank: int, bags: Bags, weights: StackedWeights, routing: Routing) -> Tensor:
    """Positions of the elements in `[T', dense_rank, P, N]`; right for ranks below the dense."""
    token = routing.token_idx[bags.entry] - routing.touched_range[0]
    column = (token * dense_rank + bags.rank) * weights.num_slices + bags.slice_idx
    return column * weights.num_slots + bags.slot


def _place_in_tails(
    dense_rank: int, tails: list[Tail], bags: Bags, num_slices: int, routing: Routing
) -> Tensor:
    """Positions of the elements in the tails; right for ranks from the dense one on."""
    # By slot: a slot has one segment. Columns: offset, first entry, ranks of the tail.
    table = torch.zeros(routing.num_slots, 3, dtype=torch.int64)
    for tail in tails:
        row = (tail.offset, tail.segment.start, tail.rank - dense_rank)
        table[tail.segment.slot] = torch.tensor(row)
    offset, start, width = table.to(routing.device)[bags.slot].unbind(1)
    rank = (bags.entry - start) * width + bags.rank - dense_rank
    return offset + rank * num_slices + bags.slice_idx
