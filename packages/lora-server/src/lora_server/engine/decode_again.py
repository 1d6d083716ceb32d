"""DecodeAgain: the layout of the last step, in which each sequence decoded, moved on by one token.

Only ids and positions differ then, as long as no sequence begins a block.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
import torch

from lora_server.model.attention_step import AttentionStep, DecodeGroup

from .step_batch import StepBatch

if TYPE_CHECKING:
    from collections.abc import Sequence


class DecodeAgain:
    """Lays out the next step of the same sequences in the same blocks.

    Arrays are written over from step to step, since the last one has been computed by then. On a
    CPU the tensors are these arrays. An operator of torch or numpy that has not run for some
    milliseconds takes up to 0.3 ms, because nothing of it is in the caches any more: so one
    addition moves everything on, and ids do without either.
    """

    __slots__ = (
        "_device",
        "_groups",
        "_ids",
        "_moving",
        "_rows",
        "_sequences",
        "_tensors",
    )

    def __init__(self, step: StepBatch) -> None:
        """Keep what stays of a step, which has been computed, and in which each row decoded."""
        self._sequences = tuple(chunk.sequence for chunk in step.rows.chunks)
        self._rows = step.rows
        self._groups = step.attention.decode
        self._device = step.input_ids.device
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

    def next(self) -> StepBatch:
        """Lay out the newest token of each sequence, which is one further than the last time."""
        self._ids[:] = array("q", [sequence.token_ids[-1] for sequence in self._sequences])
        self._moving += 1
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

    def _on_device(self) -> Sequence[torch.Tensor]:
        if self._device.type == "cpu":
            return self._tensors
        return [tensor.to(self._device, non_blocking=True) for tensor in self._tensors]


def _moved(group: DecodeGroup, positions: torch.Tensor) -> DecodeGroup:
    """Return a group with other positions; masks are made anew."""
    return DecodeGroup(
        rows=group.rows,
        blocks=group.blocks,
        blocks_per_sequence=group.blocks_per_sequence,
        positions=positions,
    )
