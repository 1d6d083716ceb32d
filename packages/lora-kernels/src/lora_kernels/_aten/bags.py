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
    """Row of B seen as `[R * N * C, chunk]`, `[F]` int64."""

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
    key = ("bags", weights.out_features, ranks)
    bags: Bags | None = routing.derived.get(key)
    if bags is None:
        bags = routing.derived[key] = _build_bags(weights, routing, ranks)
    return bags


def _build_bags(weights: StackedWeights, routing: Routing, ranks: SegmentRanks) -> Bags:
    device = routing.device
    num_chunks = weights.slice_of_chunk.shape[0]
    # A cell is a pair (entry, chunk), `entry * C + chunk`. Cells are sorted by bag, stable, so
    # that a token with several entries has them in the order of the routing.
    bag_of_cell = routing.entry_rows[:, None] * num_chunks + torch.arange(num_chunks, device=device)
    bag_of_cell, cells = torch.sort(bag_of_cell.flatten(), stable=True)
    entry, chunk = cells // num_chunks, cells % num_chunks
    slot, slice_idx = routing.entry_slots[entry], weights.slice_of_chunk[chunk]
    counts = torch.tensor(ranks, device=device)[routing.entry_segments[entry], slice_idx]
    firsts = counts.cumsum(0) - counts
    first_piece = slot * num_chunks + chunk
    starts = firsts
    if routing.has_repeated_tokens:
        opens_bag = torch.ones_like(bag_of_cell, dtype=torch.bool)
        opens_bag[1:] = bag_of_cell.diff() != 0
        starts = firsts[opens_bag]
    by_cell = torch.stack([firsts, first_piece, entry, slot, slice_idx], 1)
    by_element = by_cell.repeat_interleave(counts, dim=0)
    rank = torch.arange(by_element.shape[0], device=device) - by_element[:, 0]
    return Bags(
        starts=starts,
        pieces=by_element[:, 1] + rank * (weights.num_slots * num_chunks),
        entry=by_element[:, 2],
        slot=by_element[:, 3],
        rank=rank,
        slice_idx=by_element[:, 4],
    )
