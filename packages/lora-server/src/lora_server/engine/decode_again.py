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

    Arrays are written over from step to step, since the last one has been computed by then; on a
    CPU they are the tensors, and a step is the same object as the last one while all of them stay
    where they are. An operator of torch or numpy that
    has not run for some milliseconds takes up to 0.3 ms, because nothing of it is in the caches any
    more: so one addition moves everything on, and ids do without either.
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
        "_on_cpu",
        "_rows",
        "_sequences",
        "_tensors",
    )

    def __init__(self, step: StepBatch, *, block_size: int) -> None:
        """Keep what stays of a step, which has been computed, and in which each row decoded."""
        self._block_size = block_size
        self._sequences = tuple(chunk.sequence for chunk in step.rows.chunks)
        self._rows = step.rows
        self._device = step.input_ids.device
        groups = step.attention.decode
        moving = (
            step.position_ids[0],
            step.attention.token_slots,
            *(group.positions for group in groups),
        )
        self._growing = _by_growth(moving[0].tolist(), groups, block_size)
        self._at = 0
        self._blocks = [_table(group) for group in groups]
        """Blocks of each group, `[B, M]`."""
        self._moving = np.concatenate([tensor.cpu().numpy() for tensor in moving])
        """Positions, places in the flat store, and the positions of each group's tokens."""
        self._ids = array("q", bytes(8 * len(self._sequences)))
        parts = torch.split(torch.from_numpy(self._moving), [len(tensor) for tensor in moving])
        ids = torch.frombuffer(self._ids, dtype=torch.int64)
        self._tensors = (ids.unsqueeze(0), parts[0].unsqueeze(0), *parts[1:])
        self._groups = tuple(
            DecodeGroup(
                rows=group.rows,
                blocks=self._flat(table),
                blocks_per_sequence=group.blocks_per_sequence,
                positions=positions,
            )
            for group, table, positions in zip(groups, self._blocks, parts[2:], strict=True)
        )
        self._on_cpu = self._step(self._tensors) if self._device.type == "cpu" else None

    def next(self) -> StepBatch:
        """Lay out the newest token of each sequence, which is one further than the last time."""
        self._ids[:] = array("q", [sequence.token_ids[-1] for sequence in self._sequences])
        self._moving += 1
        if growing := self._growing[self._at]:
            self._begin_blocks(growing)
        self._at = (self._at + 1) % self._block_size
        for group in self._groups:
            group.forget_masks()
        if self._on_cpu is not None:
            return self._on_cpu
        tensors = [tensor.to(self._device, non_blocking=True) for tensor in self._tensors]
        for group, positions in zip(self._groups, tensors[3:], strict=True):
            group.positions = positions
        return self._step(tensors)

    def _step(self, tensors: Sequence[torch.Tensor]) -> StepBatch:
        return StepBatch(
            rows=self._rows,
            input_ids=tensors[0],
            position_ids=tensors[1],
            attention=AttentionStep(token_slots=tensors[2], decode=self._groups, prefill=()),
        )

    def _begin_blocks(self, growing: Sequence[_Place]) -> None:
        """Write the newest blocks of some rows, each of which begins one with this token."""
        first_slot = len(self._sequences)
        changed = set() if self._on_cpu is not None else {place.group for place in growing}
        for row, number, member in growing:
            block_ids = self._sequences[row].block_ids
            self._moving[first_slot + row] = block_ids[-1] * self._block_size
            table = self._blocks[number]
            if len(block_ids) > table.shape[1]:
                # The rows that are not so long name their first block once more.
                table = self._blocks[number] = np.concatenate((table, table[:, :1]), axis=1)
                changed.add(number)
            table[member, len(block_ids) - 1] = block_ids[-1]
        for number in changed:
            group, table = self._groups[number], self._blocks[number]
            group.blocks, group.blocks_per_sequence = self._flat(table), table.shape[1]
        if changed and self._on_cpu is not None:
            self._on_cpu = self._step(self._tensors)  # its addresses may have been kept

    def _flat(self, table: np.ndarray) -> torch.Tensor:
        """Return blocks `[B, M]` as attention wants them; on a CPU the same memory."""
        return torch.from_numpy(table.reshape(-1)).to(self._device)


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
