"""DecodeAgain: the layout of the last step, in which each sequence decoded, moved on by one token.

Only ids and positions differ then, and the newest block of a sequence that begins one.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lora_server.model.attention_step import AttentionStep, DecodeGroup

from .step_batch import StepBatch

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Place(NamedTuple):
    """Where a row is among the decode groups."""

    row: int
    group: int
    member: int
    """Number in the group."""


class DecodeAgain:
    """Lays out the next step of the same sequences.

    Arrays are written over from step to step, since the last one has been computed by then. On a
    CPU the tensors are these arrays. An operator of torch or numpy that has not run for some
    milliseconds takes up to 0.3 ms, because nothing of it is in the caches any more: so one
    addition moves everything on, and ids do without either.
    """

    __slots__ = (
        "_at",
        "_block_size",
        "_blocks",
        "_device",
        "_groups",
        "_growing",
        "_ids",
        "_moving",
        "_rows",
        "_sequences",
        "_tensors",
    )

    def __init__(self, step: StepBatch, *, block_size: int) -> None:
        """Keep what stays of a step, which has been computed, and in which each row decoded."""
        self._block_size = block_size
        self._sequences = tuple(chunk.sequence for chunk in step.rows.chunks)
        self._rows = step.rows
        self._groups = list(step.attention.decode)
        self._device = step.input_ids.device
        self._blocks = [_table(group) for group in self._groups]
        """Blocks of each group, `[B, M]`; on a CPU its tensor is a view of them."""
        moving = (
            step.position_ids[0],
            step.attention.token_slots,
            *(group.positions for group in self._groups),
        )
        self._moving = np.concatenate([tensor.cpu().numpy() for tensor in moving])
        """Positions, places in the flat store, and the positions of each group's tokens."""
        self._ids = array("q", bytes(8 * len(self._sequences)))
        parts = torch.split(torch.from_numpy(self._moving), [len(tensor) for tensor in moving])
        ids = torch.frombuffer(self._ids, dtype=torch.int64)
        self._tensors = (ids.unsqueeze(0), parts[0].unsqueeze(0), *parts[1:])
        self._growing = _by_growth(moving[0].tolist(), self._groups, block_size)
        self._at = 0

    def next(self) -> StepBatch:
        """Lay out the newest token of each sequence, which is one further than the last time."""
        self._ids[:] = array("q", [sequence.token_ids[-1] for sequence in self._sequences])
        self._moving += 1
        if growing := self._growing[self._at]:
            self._begin_blocks(growing)
        self._at = (self._at + 1) % self._block_size
        input_ids, position_ids, token_slots, *positions = self._on_device()
        return StepBatch(
            rows=self._rows,
            input_ids=input_ids,
            position_ids=position_ids,
            attention=AttentionStep(
                token_slots=token_slots,
                decode=tuple(map(_moved, self._groups, positions)),
                prefill=(),
            ),
        )

    def _begin_blocks(self, growing: Sequence[_Place]) -> None:
        """Write the newest blocks of some rows, each of which begins one with this token."""
        first_slot = len(self._sequences)
        for row, group, member in growing:
            block_ids = self._sequences[row].block_ids
            self._moving[first_slot + row] = block_ids[-1] * self._block_size
            table = self._blocks[group]
            if len(block_ids) > table.shape[1]:
                # The rows that are not so long name their first block once more.
                table = self._blocks[group] = np.concatenate((table, table[:, :1]), axis=1)
            table[member, len(block_ids) - 1] = block_ids[-1]
        for group in {place.group for place in growing}:
            self._groups[group] = self._grown(self._groups[group], self._blocks[group])

    def _grown(self, group: DecodeGroup, table: np.ndarray) -> DecodeGroup:
        """Return a group with other blocks."""
        return DecodeGroup(
            rows=group.rows,
            blocks=torch.from_numpy(table.reshape(-1)).to(self._device),
            blocks_per_sequence=table.shape[1],
            positions=group.positions,
        )

    def _on_device(self) -> Sequence[torch.Tensor]:
        if self._device.type == "cpu":
            return self._tensors
        return [tensor.to(self._device, non_blocking=True) for tensor in self._tensors]


def _table(group: DecodeGroup) -> np.ndarray:
    """Return a copy of a group's blocks, `[B, M]`."""
    return np.array(group.blocks.cpu().numpy()).reshape(-1, group.blocks_per_sequence)


def _by_growth(
    positions: Sequence[int], groups: Sequence[DecodeGroup], block_size: int
) -> list[list[_Place]]:
    """Return which rows begin a block in the next step, in the one after it, and so on.

    Args:
        positions: of each row's last token.
        groups: who is in which.
        block_size: tokens of a block, after as many steps of which it begins again.
    """
    found: list[list[_Place]] = [[] for _ in range(block_size)]
    for number, group in enumerate(groups):
        rows = range(len(positions)) if group.rows is None else group.rows.tolist()
        for member, row in enumerate(rows):
            place = _Place(row, number, member)
            found[-(positions[row] + 1) % block_size].append(place)
    return found


def _moved(group: DecodeGroup, positions: torch.Tensor) -> DecodeGroup:
    """Return a group with other positions; masks are made anew."""
    return DecodeGroup(
        rows=group.rows,
        blocks=group.blocks,
        blocks_per_sequence=group.blocks_per_sequence,
        positions=positions,
    )
