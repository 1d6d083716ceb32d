"""How one step runs through one kind of module: which products, and the index tensors they need.

A plan depends on the routing, on the true ranks of its slots and on the module's sizes, not on
the numbers in the weights: it is made once a step and kept on the routing for the next layers.

Letters: `T` tokens, `E` entries, `G` segments, `N` slots, `P` slices, `I` in, `O` out,
`F` elements of bags.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch

from lora_kernels._aten.bags import bags_of
from lora_kernels._aten.costs import costs_of

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels._aten.bags import Bags, SegmentRanks
    from lora_kernels._aten.costs import Costs
    from lora_kernels.routing import Routing, Segment
    from lora_kernels.weights import StackedWeights


class Way(Enum):
    """The ways through `apply_lora_`."""

    BAGS = auto()
    """Few products with A, then each token sums its own rows of B."""

    SEGMENTS = auto()
    """A product with A for each segment, and one with B for each of its slices, written into y."""

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

    dense_rank: int = 0
    """So many ranks of all slots are one product over all touched tokens, `[T', rank, P, N]`."""

    tails: tuple[Tail, ...] = ()

    num_factors: int = 0
    """Elements of the dense result and the tails together."""

    bags: Bags | None = None
    """Left out unless the way is `BAGS` and some slice is present."""

    take: Tensor | None = None
    """Which factor each element of the bags has, `[F]` int64."""

    scales: Tensor | None = None
    """Scale of each element, `[F]` float32; left out when all are 1."""


def plan_apply(
    x_dtype: torch.dtype, y_dtype: torch.dtype, weights: StackedWeights, routing: Routing
) -> Plan:
    """Return the plan of this step for modules like `weights`; made at the first call."""
    ranks = tuple([weights.slot_ranks[segment.slot] for segment in routing.segments])
    key = (x_dtype, y_dtype, weights.layout, ranks)
    plan: Plan | None = routing.derived.get(key)
    if plan is None:
        way, dense_rank = _choose(x_dtype, y_dtype, weights, routing, ranks)
        plan = Plan(way=way)
        if way is Way.BAGS and any(map(any, ranks)):
            plan = _plan_bags(dense_rank, weights, routing, ranks)
        routing.derived[key] = plan
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
    """Return the cheapest way, and its dense rank."""
    compute = compute_dtype(x_dtype, weights.dtype)
    if compute != weights.dtype:
        return Way.WIDE, 0
    costs = costs_of(compute)
    candidates = {0, *map(max, ranks)}
    shrinks = {rank: _shrink_cost(rank, costs, weights, routing, ranks) for rank in candidates}
    dense_rank = min(candidates, key=lambda rank: (shrinks[rank], rank))
    bags, products = _expand_costs(costs, weights, routing, ranks)
    if shrinks[dense_rank] + bags < shrinks[0] + products:
        return Way.BAGS, dense_rank
    can_write_through = y_dtype == compute and not routing.has_repeated_tokens
    return Way.SEGMENTS if can_write_through else Way.WIDE, 0


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


def _expand_costs(
    costs: Costs, weights: StackedWeights, routing: Routing, ranks: SegmentRanks
) -> tuple[float, float]:
    """Return the cost of bags, and that of products for each segment and slice."""
    bags = costs.bag + costs.bag_out * routing.num_entries * weights.total_out_features / 1e3
    products = 0.0
    for segment, by_slice in zip(routing.segments, ranks, strict=True):
        rows = segment.end - segment.start
        for rank, out in zip(by_slice, weights.out_features, strict=True):
            bags += costs.in_bag(rows, rank, out, weights.chunk)
            products += costs.expand(rows, rank, out) if rank else 0.0
    return bags, products


def _plan_bags(
    dense_rank: int, weights: StackedWeights, routing: Routing, ranks: SegmentRanks
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
    return Plan(
        way=Way.BAGS,
        dense_rank=dense_rank,
        tails=tuple(tails),
        num_factors=offset,
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
