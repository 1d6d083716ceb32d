"""How one step runs through one kind of module: which products, and the index tensors they need.

A plan depends on the routing, on the true ranks of its slots and on the module's sizes, not on
the numbers in the weights: it is made once a step and kept on the routing for the next layers.

Letters: `T` tokens, `E` entries, `G` segments, `N` slots, `R` max rank, `P` slices, `U` tokens
with an entry, `F` ranks summed over the entries, `I` in, `O` out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch

from lora_kernels._aten.costs import costs_of

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels._aten.costs import Costs
    from lora_kernels.routing import Routing
    from lora_kernels.weights import StackedWeights

Ranks = tuple[int, ...]
"""True rank of one slice for each segment, `G` long."""


class Way(Enum):
    """The ways to apply a step."""

    DENSE_BAGS = auto()
    """One product of all tokens with the A of all slots, then bags."""

    SEGMENT_BAGS = auto()
    """One product with A a segment, then bags: each token sums its own rows of B."""

    SEGMENTS = auto()
    """Products with A and with B a segment, written into the output."""

    WIDE = auto()
    """As `SEGMENTS`, through float32 sums: where dtypes differ or tokens repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bags:
    """The rows of B that each touched token sums, for one slice; ordered by token."""

    starts: Tensor
    """First element of each touched token, `[U]` int64."""

    entry: Tensor
    """Entry of each element, `[F]` int64."""

    rank: Tensor
    """Rank index of each element, `[F]` int64."""

    slot: Tensor
    """Slot of each element, `[F]` int64."""

    rows: Tensor
    """`slot * R + rank`: row of B seen as `[N * R, O]`, `[F]` int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `apply_lora_` does for one kind of module in one step."""

    way: Way

    top_rank: int
    """The largest true rank of any slot and slice of the step."""

    bags: tuple[Bags, ...] = ()
    """For each slice; empty unless the way uses bags."""

    take: Tensor | None = None
    """Where the bags' factors lie in the result of the shrink, `[P * F]` int64."""

    sizes: tuple[int, ...] = ()
    """`F` of each slice: how `take` is divided."""

    scales: Tensor | None = None
    """Scale of each factor, `[P * F]` float32; left out when all are 1."""


def plan_apply(
    x_dtype: torch.dtype, y_dtype: torch.dtype, weights: StackedWeights, routing: Routing
) -> Plan:
    """Return the plan of this step for modules like `weights`; made at the first call."""
    ranks = tuple([weights.slot_ranks[segment.slot] for segment in routing.segments])
    key = (x_dtype, y_dtype, weights.layout, ranks)
    plan: Plan | None = routing.derived.get(key)
    if plan is None:
        by_slice = tuple(zip(*ranks, strict=True))
        way = _choose_way(x_dtype, y_dtype, weights, routing, by_slice)
        plan = routing.derived[key] = _build_plan(way, weights, routing, by_slice)
    return plan


def plan_bags(weights: StackedWeights, routing: Routing, ranks: Ranks) -> Bags:
    """Return the bags of a slice whose segments have these true ranks."""
    key = ("bags", weights.max_rank, ranks)
    bags: Bags | None = routing.derived.get(key)
    if bags is None:
        bags = routing.derived[key] = _build_bags(weights.max_rank, routing, ranks)
    return bags


def compute_dtype(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the products: bfloat16 when both are, else float32.

    Products of float16 overflow at 65504 where the result would be finite, so it is widened too.
    """
    both_bfloat16 = x_dtype == weight_dtype == torch.bfloat16
    return torch.bfloat16 if both_bfloat16 else torch.float32


def _choose_way(
    x_dtype: torch.dtype,
    y_dtype: torch.dtype,
    weights: StackedWeights,
    routing: Routing,
    by_slice: tuple[Ranks, ...],
) -> Way:
    compute = compute_dtype(x_dtype, weights.dtype)
    if compute != weights.dtype:
        return Way.WIDE
    costs = costs_of(compute)
    dense = _dense_shrink_cost(costs, weights, routing, by_slice)
    segments = _segment_shrink_cost(costs, weights, routing, by_slice)
    bags, products = _expand_costs(costs, weights, routing, by_slice)
    can_write_through = y_dtype == compute and not routing.has_repeated_tokens
    if min(dense, segments) + bags < segments + products:
        return Way.DENSE_BAGS if dense < segments else Way.SEGMENT_BAGS
    return Way.SEGMENTS if can_write_through else Way.WIDE


def _dense_shrink_cost(
    costs: Costs, weights: StackedWeights, routing: Routing, by_slice: tuple[Ranks, ...]
) -> float:
    top_rank = max(max(ranks) for ranks in by_slice)
    num_ranks = top_rank * weights.num_slices * weights.num_slots
    return costs.shrink(routing.touched_range[1], num_ranks, weights.in_features)


def _segment_shrink_cost(
    costs: Costs, weights: StackedWeights, routing: Routing, by_slice: tuple[Ranks, ...]
) -> float:
    total = 0.0
    for segment, ranks in zip(routing.segments, zip(*by_slice, strict=True), strict=True):
        rows = segment.end - segment.start
        total += costs.shrink(rows, sum(ranks), weights.in_features)
    return total


def _expand_costs(
    costs: Costs, weights: StackedWeights, routing: Routing, by_slice: tuple[Ranks, ...]
) -> tuple[float, float]:
    bags = products = 0.0
    for ranks, out in zip(by_slice, weights.out_features, strict=True):
        sizes = [
            (segment.end - segment.start, rank)
            for segment, rank in zip(routing.segments, ranks, strict=True)
        ]
        bags += costs.bags(sizes, out)
        products += sum(costs.expand(rows, rank, out) for rows, rank in sizes if rank)
    return bags, products


def _build_plan(
    way: Way, weights: StackedWeights, routing: Routing, by_slice: tuple[Ranks, ...]
) -> Plan:
    top_rank = max(max(ranks) for ranks in by_slice)
    if way in (Way.SEGMENTS, Way.WIDE) or top_rank == 0:
        return Plan(way=way, top_rank=top_rank)
    bags = tuple(plan_bags(weights, routing, ranks) for ranks in by_slice)
    place = _place_in_dense if way is Way.DENSE_BAGS else _place_in_segments
    takes = [place(p, bag, top_rank, weights, routing) for p, bag in enumerate(bags)]
    scales = None
    if not routing.has_unit_scales:
        scales = routing.scales[torch.cat([bag.entry for bag in bags])]
    return Plan(
        way=way,
        top_rank=top_rank,
        bags=bags,
        take=torch.cat(takes),
        sizes=tuple(take.shape[0] for take in takes),
        scales=scales,
    )


def _build_bags(max_rank: int, routing: Routing, ranks: Ranks) -> Bags:
    # Entries in the order of their tokens; within a token in the order of the routing.
    order = torch.argsort(routing.token_idx, stable=True)
    seg_ranks = torch.tensor(ranks, device=routing.device)
    entry_ranks = torch.repeat_interleave(seg_ranks, routing.seg_indptr.diff())[order]
    ends = entry_ranks.cumsum(0)
    position = torch.repeat_interleave(entry_ranks)
    rank = torch.arange(position.shape[0], device=routing.device)
    rank = rank - (ends - entry_ranks)[position]
    entry = order[position]
    slot = routing.entry_slots[entry]
    # The first entry of each token opens its bag, also when its rank is 0.
    is_first = torch.ones_like(order, dtype=torch.bool)
    is_first[1:] = routing.token_idx[order].diff() != 0
    return Bags(
        starts=(ends - entry_ranks)[is_first],
        entry=entry,
        rank=rank,
        slot=slot,
        rows=slot * max_rank + rank,
    )


def _place_in_dense(
    p: int, bag: Bags, top_rank: int, weights: StackedWeights, routing: Routing
) -> Tensor:
    """Positions in the dense result, `[T', top_rank, P, N]` from the first touched token on."""
    token = routing.token_idx[bag.entry] - routing.touched_range[0]
    column = (token * top_rank + bag.rank) * weights.num_slices + p
    return column * weights.num_slots + bag.slot


def _place_in_segments(
    p: int, bag: Bags, top_rank: int, _weights: StackedWeights, routing: Routing
) -> Tensor:
    """Positions in the segments' result, `[P, E, top_rank]`."""
    return (p * routing.num_entries + bag.entry) * top_rank + bag.rank
