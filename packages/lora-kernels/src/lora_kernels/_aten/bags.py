"""Bags: the rows of B that each token of a step sums, as index tensors.

Letters: `T` tokens, `E` entries, `G` segments, `N` slots, `R` max rank, `P` slices, `U` tokens
with an entry, `C` chunks of the output, `F` elements: ranks summed over entries and chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.routing import Routing
    from lora_kernels.weights import StackedWeights

SegmentRanks = tuple[tuple[int, ...], ...]
"""True rank of each slice, for each segment of a step: `G` tuples of `P`."""


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


def bags_of(weights: StackedWeights, routing: Routing, ranks: SegmentRanks) -> Bags:
    """Return the bags of a step for segments of these ranks; made at the first call."""
    key = ("bags", weights.max_rank, weights.out_features, ranks)
    bags: Bags | None = routing.derived.get(key)
    if bags is None:
        bags = routing.derived[key] = _build_bags(weights, routing, ranks)
    return bags


def _build_bags(weights: StackedWeights, routing: Routing, ranks: SegmentRanks) -> Bags:
    device = routing.device
    chunk_counts = torch.tensor(weights.out_features, device=device) // weights.chunk
    num_chunks = weights.total_out_features // weights.chunk
    slice_of_chunk = torch.repeat_interleave(chunk_counts)
    # A cell is a pair (entry, chunk), `entry * C + chunk`. Cells are sorted by bag, stable, so
    # that a token with several entries has them in the order of the routing.
    bag_of_cell = routing.entry_rows[:, None] * num_chunks + torch.arange(num_chunks, device=device)
    bag_of_cell, cells = torch.sort(bag_of_cell.flatten(), stable=True)
    cell_entry, cell_chunk = cells // num_chunks, cells % num_chunks
    rank_of_entry = torch.tensor(ranks, device=device)[routing.entry_segments]
    counts = rank_of_entry[cell_entry, slice_of_chunk[cell_chunk]]
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
