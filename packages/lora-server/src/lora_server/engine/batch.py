"""A step's input: one packed `[1, T]` row of tokens, and what attention and LoRA must know of it.

Sequences are ordered by adapter, so that each adapter's tokens are consecutive rows.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lora_layers import RowRun
from lora_server.model.attention_step import AttentionStep, DecodeGroup, PrefillChunk

from .block_table import BlockTable
from .decode_again import DecodeAgain
from .step_batch import LogitsRows, StepBatch, StepRows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .scheduler import ScheduledChunk
    from .sequence import SequenceState


class _LastStep(NamedTuple):
    """A step in which each sequence decoded."""

    chunks: Sequence[ScheduledChunk]
    """As the scheduler chose them."""
    step: StepBatch


class BatchBuilder:
    """Lays out steps. What stays while the same sequences decode is kept from step to step."""

    def __init__(self, *, block_size: int, device: torch.device) -> None:
        """Start without a step.

        Args:
            block_size: tokens a KV block holds.
            device: where the tensors are made.
        """
        self._block_size = block_size
        self._device = device
        self._table = BlockTable()
        self._rows: StepRows | None = None
        self._last: _LastStep | None = None
        self._again: DecodeAgain | None = None
        """What moves the last step on, once it has been wanted."""

    def build(self, chunks: Sequence[ScheduledChunk]) -> StepBatch:
        """Lay out a step.

        Args:
            chunks: what the scheduler chose, in any order; at least one. The very same object as
                before says that the same sequences decode.
        """
        last = self._last
        if last is None or chunks is not last.chunks:
            return self._build(chunks)
        if self._again is None:
            self._again = DecodeAgain(last.step, block_size=self._block_size)
        return self._again.next()

    def _build(self, chunks: Sequence[ScheduledChunk]) -> StepBatch:
        ordered = tuple(sorted(chunks, key=lambda chunk: chunk.sequence.adapter_order))
        rows = self._rows
        if rows is None or not _goes_on(rows, ordered):
            rows = self._rows = self._lay_out(ordered)
        self._table.update([chunk.sequence for chunk in ordered])
        token_ids, starts = _tokens(ordered)
        counts = np.array([chunk.num_tokens for chunk in ordered])
        ends = counts.cumsum()
        row_of = np.repeat(np.arange(len(ordered)), counts)
        positions = np.arange(len(token_ids)) + (starts - (ends - counts))[row_of]
        step = StepBatch(
            rows=rows,
            input_ids=torch.tensor([token_ids], device=self._device),
            position_ids=self._tensor(positions).unsqueeze(0),
            attention=AttentionStep(
                token_slots=self._tensor(self._table.slots(row_of, positions, self._block_size)),
                decode=self._decode_groups(starts, counts, ends),
                prefill=self._prefill_chunks(starts, counts, ends),
            ),
        )
        self._last = _LastStep(chunks, step) if rows.is_decode else None
        self._again = None
        return step

    def _lay_out(self, ordered: tuple[ScheduledChunk, ...]) -> StepRows:
        idx, logits_rows = _logits_rows(ordered)
        sampled = [rows for rows in logits_rows if rows.is_sampled and _wants_token(rows.sequence)]
        is_decode = len(sampled) == len(ordered) and all(n == 1 for _, n in ordered)
        return StepRows(
            chunks=ordered,
            token_runs=_runs((chunk.sequence, chunk.num_tokens) for chunk in ordered),
            logits_runs=_runs((rows.sequence, rows.num_rows) for rows in logits_rows),
            logits_idx=torch.tensor(idx, dtype=torch.int64, device=self._device),
            logits_rows=logits_rows,
            sampled=tuple(rows.sequence for rows in sampled),
            sampled_idx=tuple(rows.first + rows.num_prompt_rows for rows in sampled),
            is_decode=is_decode,
            is_plain=is_decode and all(map(_is_plain, ordered)),
        )

    def _decode_groups(
        self, starts: np.ndarray, counts: np.ndarray, ends: np.ndarray
    ) -> tuple[DecodeGroup, ...]:
        """Sequences that bring one token, grouped so that padding stays below half."""
        single = np.flatnonzero(counts == 1)
        if not len(single):
            return ()
        num_blocks = starts[single] // self._block_size + 1
        groups = [single]
        if num_blocks.max() * len(single) > 2 * num_blocks.sum():
            groups = [single[group] for group in _split_by_length(num_blocks)]
        is_whole = len(groups) == 1 and len(single) == ends[-1]
        return tuple(self._decode_group(group, starts, ends, is_whole=is_whole) for group in groups)

    def _decode_group(
        self, group: np.ndarray, starts: np.ndarray, ends: np.ndarray, *, is_whole: bool
    ) -> DecodeGroup:
        positions = starts[group]
        width = int(positions.max()) // self._block_size + 1
        return DecodeGroup(
            rows=None if is_whole else self._tensor(ends[group] - 1),
            blocks=self._tensor(self._table.first_blocks(group, width).reshape(-1)),
            blocks_per_sequence=width,
            positions=self._tensor(positions),
        )

    def _prefill_chunks(
        self, starts: np.ndarray, counts: np.ndarray, ends: np.ndarray
    ) -> tuple[PrefillChunk, ...]:
        found = []
        for i in np.flatnonzero(counts > 1):
            context, count = int(starts[i]), int(counts[i])
            width = -(-(context + count) // self._block_size)
            found.append(
                PrefillChunk(
                    start=int(ends[i]) - count,
                    num_tokens=count,
                    context=context,
                    blocks=self._tensor(self._table.first_blocks(np.array([i]), width)[0]),
                )
            )
        return tuple(found)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def _goes_on(rows: StepRows, ordered: tuple[ScheduledChunk, ...]) -> bool:
    """Whether the same sequences decode as before. One that has started over may not."""
    return (
        rows.is_decode
        and ordered == rows.chunks
        and all(len(c.sequence.token_ids) - c.sequence.num_computed == 1 for c in ordered)
    )


def _wants_token(sequence: SequenceState) -> bool:
    return sequence.sampling.max_tokens > sequence.num_generated


def _is_plain(chunk: ScheduledChunk) -> bool:
    sequence = chunk.sequence
    return sequence.is_plain and sequence.sampling.prompt_logprobs is None


def _tokens(chunks: Iterable[ScheduledChunk]) -> tuple[list[int], np.ndarray]:
    """Return the tokens of all chunks, and the position of each chunk's first one."""
    token_ids: list[int] = []
    starts: list[int] = []
    for sequence, num_tokens in chunks:
        start = sequence.num_computed
        starts.append(start)
        if num_tokens == 1:
            token_ids.append(sequence.token_ids[start])
        else:
            token_ids += sequence.token_ids[start : start + num_tokens]
    return token_ids, np.array(starts)


def _runs(rows: Iterable[tuple[SequenceState, int]]) -> tuple[RowRun, ...]:
    """Join neighbours that use the same adapters at the same scales."""
    return tuple(
        RowRun(num_rows=sum(count for _, count in run), adapters=adapters)
        for adapters, run in groupby(rows, key=lambda row: row[0].adapter_order)
    )


def _logits_rows(
    chunks: Sequence[ScheduledChunk],
) -> tuple[list[int], tuple[LogitsRows, ...]]:
    """Token rows whose logits are wanted, and whose they are."""
    idx: list[int] = []
    found: list[LogitsRows] = []
    row = 0
    for sequence, count in chunks:
        stop = sequence.num_computed + count
        is_sampled = stop == len(sequence.token_ids)
        num_prompt_rows = 0
        if sequence.needs_prompt_rows:
            # The last prompt token has no successor in the prompt: its row samples.
            last = min(stop, sequence.num_prompt_tokens - 1)
            num_prompt_rows = max(last - sequence.num_computed, 0)
        if num_prompt_rows or is_sampled:
            found.append(LogitsRows(sequence, len(idx), num_prompt_rows, is_sampled))
            idx.extend(range(row, row + num_prompt_rows))
            idx.extend([row + count - 1] * is_sampled)
        row += count
    return idx, tuple(found)


def _split_by_length(num_blocks: np.ndarray) -> list[list[int]]:
    """Longest first; a new group starts where less than half of the padded length is used."""
    groups: list[list[int]] = []
    longest = 0
    for i in np.argsort(-num_blocks, kind="stable").tolist():
        if groups and 2 * num_blocks[i] >= longest:
            groups[-1].append(i)
        else:
            groups.append([i])
            longest = num_blocks[i]
    return groups
