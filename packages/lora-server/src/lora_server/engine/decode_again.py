"""DecodeAgain: the layout of the last step, in which each sequence decoded, moved on by one token.

Only ids and positions differ then, and the newest block of a sequence that begins one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lora_server.model.attention_step import AttentionStep

from .kv_layout import as_tensor, int64_array, padded_blocks, split_tensor
from .step_batch import StepBatch

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Sequence

    from lora_server.model.attention_step import DecodeGroup

    from .sequence import SequenceState


class GroupBlocks(NamedTuple):
    """The blocks of one decode group."""

    members: list[SequenceState]
    blocks: array[int]
    """`[B * M]`; on a CPU the group's tensor."""

    def widened(self, width: int) -> GroupBlocks:
        """Return them with `width` blocks a sequence, new ones included."""
        tables = (sequence.block_ids for sequence in self.members)
        return GroupBlocks(self.members, padded_blocks(tables, width))


class DecodeLayout(NamedTuple):
    """A step in which each sequence decodes, as arrays."""

    step: StepBatch
    """On a CPU its tensors are the memory of the arrays."""
    ids: array[int]
    """`[T]` tokens."""
    moving: array[int]
    """Positions `[T]`, places in the flat store `[T]`, and the positions of each group's tokens."""
    groups: list[GroupBlocks]


class _Place(NamedTuple):
    """Where a sequence is in the step."""

    row: int
    group: int
    member: int
    """Number in the group."""


class DecodeAgain:
    """Lays out the next step of the same sequences.

    Arrays are written over from step to step, since the last one has been computed by then; on a
    CPU they are the tensors, and a step is the same object as the last one while all of them stay
    where they are.
    """

    __slots__ = (
        "_at",
        "_block_size",
        "_device",
        "_groups",
        "_growing",
        "_ids",
        "_moving",
        "_numbers",
        "_sequences",
        "_step",
    )

    def __init__(self, layout: DecodeLayout, *, block_size: int) -> None:
        """Take over the layout of a step that has been computed."""
        self._step = layout.step
        self._sequences = [chunk.sequence for chunk in layout.step.rows.chunks]
        self._ids = layout.ids
        self._moving = layout.moving
        self._numbers = np.frombuffer(layout.moving, dtype=np.int64)
        """The same memory."""
        self._groups = layout.groups
        self._device = layout.step.input_ids.device
        self._block_size = block_size
        self._growing = self._by_growth()
        self._at = 0

    def next(self) -> StepBatch:
        """Lay out the newest token of each sequence, which is one further than the last time."""
        self._ids[:] = int64_array([sequence.token_ids[-1] for sequence in self._sequences])
        self._numbers += 1
        changed = self._begin_blocks(self._growing[self._at])
        self._at = (self._at + 1) % self._block_size
        decode = self._step.attention.decode
        for group in decode:
            group.forget_masks()
        if self._device.type != "cpu":
            self._step = self._copy(decode, changed)
        elif changed:
            # Another object, since the addresses of this one may have been kept.
            self._step = replace(self._step, attention=replace(self._step.attention))
        return self._step

    def _begin_blocks(self, growing: Sequence[_Place]) -> set[int]:
        """Write the newest blocks of some rows, each of which begins one with this token.

        Returns:
            Groups whose tensors are no longer what they should be; on a CPU those that have moved.
        """
        changed = set() if self._device.type == "cpu" else {place.group for place in growing}
        decode, num_rows = self._step.attention.decode, len(self._sequences)
        for row, number, member in growing:
            block_ids = self._sequences[row].block_ids
            column = self._moving[row] // self._block_size
            self._moving[num_rows + row] = block_ids[column] * self._block_size
            group = decode[number]
            if column < group.blocks_per_sequence:
                place = member * group.blocks_per_sequence + column
                self._groups[number].blocks[place] = block_ids[column]
            else:
                group.blocks_per_sequence = column + 1
                self._groups[number] = self._groups[number].widened(column + 1)
                group.blocks = as_tensor(self._groups[number].blocks, self._device)
                changed.add(number)
        return changed

    def _copy(self, decode: Sequence[DecodeGroup], changed: Iterable[int]) -> StepBatch:
        """Bring what has changed to the device."""
        for number in changed:
            decode[number].blocks = as_tensor(self._groups[number].blocks, self._device)
        sizes = [group.num_sequences for group in decode]
        position_ids, slots, *positions = split_tensor(self._moving, sizes, self._device)
        for group, found in zip(decode, positions, strict=True):
            group.positions = found
        return StepBatch(
            rows=self._step.rows,
            input_ids=as_tensor(self._ids, self._device).unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            attention=AttentionStep(token_slots=slots, decode=tuple(decode), prefill=()),
        )

    def _by_growth(self) -> list[list[_Place]]:
        """Return which rows begin a block in the next step, in the one after it, and so on."""
        found: list[list[_Place]] = [[] for _ in range(self._block_size)]
        row_of = {sequence: row for row, sequence in enumerate(self._sequences)}
        for number, group in enumerate(self._groups):
            for member, sequence in enumerate(group.members):
                row = row_of[sequence]
                steps = -(self._moving[row] + 1) % self._block_size
                found[steps].append(_Place(row, number, member))
        return found
