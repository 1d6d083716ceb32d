"""KernelTables: the routing once more, as the int32 tables that the GPU kernels walk.

Knows entries, slots and tokens; nothing of weights. Built on the host, without loops over tokens.

Letters: `T` tokens, `E` entries, `G` segments, `U` rows: tokens with an entry, `M` tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

SMALL_TILE = 16
"""Entries or rows of a tile at least: the height of a matrix instruction."""

LARGE_TILE = 64
"""Entries or rows of a tile of a long prefill: each read of a factor serves so many tokens."""

ROW_TILE = 1
"""No tiles: each program takes one entry or row (BGMV)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTables:
    """What programs look up; all int32, except `scales`.

    Shrink runs over entries: the tiles of `entry_tiles_*` never cross a segment, so that one slot's
    A serves a tile. Expand runs over rows, each written by one program, so that several entries of
    a token need no atomic: rows whose tokens have the same slots in the same order stand together,
    and the tiles of `row_tiles_*` never cross such a group. Without weighted sets the groups are
    the segments.

    Padding does nothing: slot -1, empty tiles, rows without entry.
    """

    entry_tokens: Tensor
    """Token of each entry, `[E]`."""

    entry_slots: Tensor
    """Slot of each entry, `[E]`."""

    scales: Tensor
    """Scale of each entry, `[E]` float32."""

    row_tokens: Tensor
    """Token of each row, `[U]`."""

    row_indptr: Tensor
    """Bounds of the rows in `row_entries`, `[U + 1]`."""

    row_entries: Tensor
    """Entries of all rows, `[E]`; those of one row in the order of the routing."""

    entry_tiles_16: Tensor
    """Bounds of tiles of at most 16 entries of a segment, `[M, 2]`."""

    entry_tiles_64: Tensor
    """As above, of at most 64."""

    row_tiles_16: Tensor
    """Bounds of tiles of at most 16 rows of a group, `[M, 2]`."""

    row_tiles_64: Tensor
    """As above, of at most 64."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> KernelTables:
        """Return tables of tensors in the order of the fields."""
        return cls(**dict(zip(TABLE_NAMES, tensors, strict=True)))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tables in the order of the fields."""
        return tuple(getattr(self, name) for name in TABLE_NAMES)

    def entry_tiles(self, tile: int) -> Tensor:
        """Return the tiles over entries of this size."""
        return self.entry_tiles_64 if tile == LARGE_TILE else self.entry_tiles_16

    def row_tiles(self, tile: int) -> Tensor:
        """Return the tiles over rows of this size."""
        return self.row_tiles_64 if tile == LARGE_TILE else self.row_tiles_16


TABLE_NAMES = tuple(field.name for field in fields(KernelTables))


def choose_tile(num_entries: int, num_segments: int) -> int:
    """Return the tile for a step: 1 (BGMV), 16 or 64 (SGMV), by the mean length of its segments.

    With up to two entries a segment a matrix instruction of 16 rows would be nearly empty, and
    single rows spread over more processors. Rows of this choice are to be measured by the bench.
    """
    if num_entries <= 2 * num_segments:
        return ROW_TILE
    return SMALL_TILE if num_entries <= LARGE_TILE // 2 * num_segments else LARGE_TILE


def build_tables(
    token_idx: Tensor,
    scales: Tensor,
    seg_indptr: Tensor,
    seg_slots: Tensor,
    *,
    num_slots: int,
    has_repeated_tokens: bool,
) -> KernelTables:
    """Build the tables of a step from the tensors of its routing, on the CPU.

    Args:
        token_idx: token of each entry, `[E]` int64, sorted by slot, then by token.
        scales: `[E]` float32.
        seg_indptr: bounds of the segments, `[G + 1]` int64.
        seg_slots: slot of each segment, `[G]` int64.
        num_slots: slots of the stacked weights.
        has_repeated_tokens: some token has several entries.
    """
    entry_slots = seg_slots.repeat_interleave(seg_indptr.diff())
    entry_tiles = {tile: _tiles_of(seg_indptr, tile) for tile in (SMALL_TILE, LARGE_TILE)}
    row_tokens, row_tiles = token_idx, entry_tiles
    row_indptr = torch.arange(token_idx.shape[0] + 1)
    row_entries = row_indptr[:-1]
    if has_repeated_tokens:
        row_tokens, row_indptr, row_entries, group_bounds = _rows_of(
            token_idx, entry_slots, num_slots
        )
        row_tiles = {tile: _tiles_of(group_bounds, tile) for tile in (SMALL_TILE, LARGE_TILE)}
    return KernelTables(
        entry_tokens=token_idx.int(),
        entry_slots=entry_slots.int(),
        scales=scales,
        row_tokens=row_tokens.int(),
        row_indptr=row_indptr.int(),
        row_entries=row_entries.int(),
        entry_tiles_16=entry_tiles[SMALL_TILE],
        entry_tiles_64=entry_tiles[LARGE_TILE],
        row_tiles_16=row_tiles[SMALL_TILE],
        row_tiles_64=row_tiles[LARGE_TILE],
    )


def _rows_of(
    token_idx: Tensor, entry_slots: Tensor, num_slots: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return row_tokens, row_indptr, row_entries, and the bounds of the groups of rows."""
    num_entries = token_idx.shape[0]
    by_token = torch.argsort(token_idx, stable=True)
    tokens, counts = torch.unique_consecutive(token_idx[by_token], return_counts=True)
    firsts = counts.cumsum(0) - counts
    group_of_row = _number_slot_lists(entry_slots[by_token], firsts, counts, num_slots)
    by_group = torch.argsort(group_of_row, stable=True)
    _, rows_by_group = torch.unique_consecutive(group_of_row[by_group], return_counts=True)
    counts = counts[by_group]
    row_indptr = _bounds_of(counts)
    shift = (firsts[by_group] - row_indptr[:-1]).repeat_interleave(counts)
    row_entries = by_token[torch.arange(num_entries) + shift]
    return tokens[by_group], row_indptr, row_entries, _bounds_of(rows_by_group)


def _number_slot_lists(slots: Tensor, firsts: Tensor, counts: Tensor, num_slots: int) -> Tensor:
    """Return a number for each row, equal for rows with equal lists of slots, `[U]`.

    One pass for each place in the longest list: few, as weighted sets are small.
    """
    number = torch.zeros_like(counts)
    for place in range(int(counts.max())):
        has_place = counts > place
        at = torch.where(has_place, firsts + place, 0)
        slot = torch.where(has_place, slots[at], num_slots)
        _, number = torch.unique(number * (num_slots + 1) + slot, return_inverse=True)
    return number


def _bounds_of(counts: Tensor) -> Tensor:
    bounds = counts.new_zeros(counts.shape[0] + 1)
    torch.cumsum(counts, 0, out=bounds[1:])
    return bounds


def _tiles_of(bounds: Tensor, tile: int) -> Tensor:
    """Cut runs, given by their bounds, into tiles: bounds of the tiles, `[M, 2]` int32."""
    starts, ends = bounds[:-1], bounds[1:]
    counts = (ends - starts + tile - 1) // tile
    first_tiles = counts.cumsum(0) - counts
    run = torch.repeat_interleave(counts)
    start = starts[run] + tile * (torch.arange(run.shape[0]) - first_tiles[run])
    return torch.stack([start, torch.minimum(start + tile, ends[run])], 1).int()
