"""The KV blocks of a step's sequences as one array, kept from step to step.

Block lists of running sequences only grow; a sequence that starts over gets a new list. So a row
is known by its list, and only what is new in it is written.
"""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .sequence import SequenceState


class BlockTable:
    """`[B, M]` int64: the blocks of each of B sequences, then its first block again and again."""

    def __init__(self) -> None:
        self._lists: list[list[int]] = []
        """The block list of each row; held, so that no other list can have its identity."""
        self._counts: list[int] = []
        """Blocks of each row that are in the table."""
        self._blocks = np.zeros((0, 1), dtype=np.int64)

    @property
    def width(self) -> int:
        """Columns there are."""
        return int(self._blocks.shape[1])

    def update(self, sequences: Sequence[SequenceState]) -> None:
        """Make row i that of sequence i; each has at least one block."""
        lists = [sequence.block_ids for sequence in sequences]
        if len(lists) != len(self._lists) or not all(map(is_, lists, self._lists)):
            self._take_rows(lists)
        for row, (blocks, count) in enumerate(zip(lists, self._counts, strict=True)):
            if len(blocks) > count:
                self._write(row, blocks, count)

    def slots(self, rows: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
        """Return the places of tokens in the flat store.

        Args:
            rows: of their sequences, `[T]`.
            positions: in their sequences, `[T]`.
            block_size: tokens of a block.
        """
        columns, offsets = np.divmod(positions, block_size)
        return np.asarray(self._blocks[rows, columns] * block_size + offsets)

    def first_blocks(self, rows: np.ndarray, width: int) -> np.ndarray:
        """Return a copy of the first `width` blocks of some rows, `[len(rows), width]`."""
        return np.asarray(self._blocks[rows, :width])

    def _take_rows(self, lists: list[list[int]]) -> None:
        """Bring the rows that are there into a new order; the others are to be written."""
        known = {id(blocks): row for row, blocks in enumerate(self._lists)}
        sources = [known.get(id(blocks), -1) for blocks in lists]
        table = np.zeros((len(lists), self.width), dtype=np.int64)
        kept = [row for row, source in enumerate(sources) if source >= 0]
        table[kept] = self._blocks[[sources[row] for row in kept]]
        self._counts = [self._counts[source] if source >= 0 else 0 for source in sources]
        self._lists, self._blocks = lists, table

    def _write(self, row: int, blocks: list[int], count: int) -> None:
        """Write what is new in a row, of which `count` blocks are there."""
        if len(blocks) > self.width:
            wider = max(len(blocks), 2 * self.width)
            padding = np.repeat(self._blocks[:, :1], wider - self.width, axis=1)
            self._blocks = np.concatenate((self._blocks, padding), axis=1)
        if count == 0:
            self._blocks[row, len(blocks) :] = blocks[0]
        self._blocks[row, count : len(blocks)] = blocks[count:]
        self._counts[row] = len(blocks)
