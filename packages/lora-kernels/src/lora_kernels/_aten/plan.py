"""How one step runs through one kind of module: which products, and the index tensors they need.

A plan depends on the routing, on the true ranks of its slots and on the module's sizes, not on
the numbers in the weights: it is made once a step and kept on the routing for the next layers.

Letters: `T` tokens, `E` entries, `G` segments, `N` slots, `R` max rank, `P` slices, `I` in,
`O` out, `U` tokens with an entry, `C` chunks of the output, `F` elements: ranks summed over
entries and chunks.
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


class Shrink(Enum):
    """The ways from x to the ranks."""

    DENSE = auto()
    """One product of all tokens with the A of all slots; each entry then takes its own part."""

    SEGMENTS = auto()
    """One product with A a segment."""


class Expand(Enum):
    """The ways from the ranks to y."""

    BAGS = auto()
    """Each token sums its own rows of B."""

    SEGMENTS = auto()
    """One product with B a segment and slice, written into y."""

    WIDE = auto()
    """As `SEGMENTS` through float32 sums, also of the shrink: dtypes differ or tokens repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bags:
    """The pieces of rows of B that each touched token sums.

    The output of a touched token is cut into `C` chunks of one width that divides every slice.
    Bag `u * C + c` holds the elements of touched token `u` and chunk `c`.
    """

    starts: Tensor
    """First element of each bag, `[U * C]` int64."""

    pieces: Tensor
    """Row of B seen as `[N * R * C, chunk]`, `[F]` int64."""

    entry: Tensor
    """Entry of each element, `[F]` int64."""

    slot: Tensor
    """Slot of each element, `[F]` int64."""

    rank: Tensor
    """Rank index of each element, `[F]` int64."""

    slice_idx: Tensor
    """Slice of each element, `[F]` int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `apply_lora_` does for one kind of module in one step."""

    shrink: Shrink
    expand: Expand

    top_rank: int
    """The largest true rank of any slot and slice of the step."""

    bags: Bags | None = None
    """Left out unless the way uses bags."""

    take: Tensor | None = None
    """Where the bags' factors lie in the result of the shrink, `[F]` int64."""

    scales: Tensor | None = None
    """Scale of each factor, `[F]` float32; left out when all are 1."""


def plan_apply(
    x_dtype: torch.dtype, y_dtype: torch.dtype, weights: StackedWeights, routing: Routing
) -> Plan:
    """Return the plan of this step for modules like `weights`; made at the first call."""
    ranks = tuple([weights.slot_ranks[segment.slot] for segment in routing.segments])
    key = (x_dtype, y_dtype, weights.layout, ranks)
    plan: Plan | None = routing.derived.get(key)
    if plan is None:
        by_slice = tuple(zip(*ranks, strict=True))
        shrink, expand = _choose(x_dtype, y_dtype, weights, routing, by_slice)
        plan = routing.derived[key] = _build_plan(shrink, expand, weights, routing, by_slice)
    return plan


def plan_bags(weights: StackedWeights, routing: Routing, by_slice: tuple[Ranks, ...]) -> Bags:
    """Return the bags for slices whose segments have these true ranks; made at the first call."""
    key = ("bags", weights.max_rank, weights.out_features, by_slice)
    bags: Bags | None = routing.derived.get(key)
    if bags is None:
        bags = routing.derived[key] = _build_bags(weights, routing, by_slice)
    return bags


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
    by_slice: tuple[Ranks, ...],
) -> tuple[Shrink, Expand]:
    compute = compute_dtype(x_dtype, weights.dtype)
    if compute != weights.dtype:
        return Shrink.SEGMENTS, Expand.WIDE
    costs = costs_of(compute)
    dense = _dense_shrink_cost(costs, weights, routing, by_slice)
    segments = _segment_shrink_cost(costs, weights, routing, by_slice)
    shrink = Shrink.DENSE if dense < segments else Shrink.SEGMENTS
    bags, products = _expand_costs(costs, weights, routing, by_slice)
    if bags < products:
        return shrink, Expand.BAGS
    if y_dtype == compute and not routing.has_repeated_tokens:
        return shrink, Expand.SEGMENTS
    return Shrink.SEGMENTS, Expand.WIDE


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
    """Cost of bags, and of products a segment."""
    bags = costs.bag + costs.bag_out * routing.num_entries * weights.total_out_features / 1e3
    products = 0.0
    for ranks, out in zip(by_slice, weights.out_features, strict=True):
        for segment, rank in zip(routing.segments, ranks, strict=True):
            rows = segment.end - segment.start
            bags += costs.in_bag(rows, rank, out, weights.chunk)
            products += costs.expand(rows, rank, out) if rank else 0.0
    return bags, products


def _build_plan(
    shrink: Shrink,
    expand: Expand,
    weights: StackedWeights,
    routing: Routing,
    by_slice: tuple[Ranks, ...],
) -> Plan:
    top_rank = max(max(ranks) for ranks in by_slice)
    if expand is not Expand.BAGS or top_rank == 0:
        return Plan(shrink=shrink, expand=expand, top_rank=top_rank)
    bags = plan_bags(weights, routing, by_slice)
    place = _place_in_dense if shrink is Shrink.DENSE else _place_in_segments
    return Plan(
        shrink=shrink,
        expand=expand,
        top_rank=top_rank,
        bags=bags,
        take=place(bags, top_rank, weights, routing),
        scales=None if routing.has_unit_scales else routing.scales[bags.entry],
    )


def _build_bags(weights: StackedWeights, routing: Routing, by_slice: tuple[Ranks, ...]) -> Bags:
    device = routing.device
    chunk_counts = torch.tensor(weights.out_features, device=device) // weights.chunk
    num_chunks = weights.total_out_features // weights.chunk
    slice_of_chunk = torch.repeat_interleave(chunk_counts)
    # A cell is a pair (entry, chunk), `entry * C + chunk`. Cells are sorted by bag, stable, so
    # that a token with several entries has them in the order of the routing.
    bag_of_cell = routing.entry_rows[:, None] * num_chunks + torch.arange(num_chunks, device=device)
    bag_of_cell, cells = torch.sort(bag_of_cell.flatten(), stable=True)
    rank_of_segment = torch.tensor(by_slice, device=device)  # [P, G]
    rank_of_entry = rank_of_segment.repeat_interleave(routing.seg_indptr.diff(), dim=1)
    cell_entry, cell_chunk = cells // num_chunks, cells % num_chunks
    counts = rank_of_entry[slice_of_chunk[cell_chunk], cell_entry]
    firsts = counts.cumsum(0) - counts
    element_cell = torch.repeat_interleave(counts)
    rank = torch.arange(element_cell.shape[0], device=device) - firsts[element_cell]
    entry, chunk = cell_entry[element_cell], cell_chunk[element_cell]
    slot = routing.entry_slots[entry]
    opens_bag = torch.ones_like(bag_of_cell, dtype=torch.bool)
    opens_bag[1:] = bag_of_cell.diff() != 0
    return Bags(
        starts=firsts[opens_bag],
        pieces=(slot * weights.max_rank + rank) * num_chunks + chunk,
        entry=entry,
        slot=slot,
        rank=rank,
        slice_idx=slice_of_chunk[chunk],
    )


def _place_in_dense(bags: Bags, top_rank: int, weights: StackedWeights, routing: Routing) -> Tensor:
    """Positions in the dense result, `[T', top_rank, P, N]` from the first touched token on."""
    token = routing.token_idx[bags.entry] - routing.touched_range[0]
    column = (token * top_rank + bags.rank) * weights.num_slices + bags.slice_idx
    return column * weights.num_slots + bags.slot


def _place_in_segments(
    bags: Bags, top_rank: int, _weights: StackedWeights, routing: Routing
) -> Tensor:
    """Positions in the segments' result, `[P, E, top_rank]`."""
    return (bags.slice_idx * routing.num_entries + bags.entry) * top_rank + bags.rank
