"""A step's input: one packed `[1, T]` row of tokens, and what attention and LoRA must know of it.

Sequences are ordered by adapter, so that each adapter's tokens are consecutive rows.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from lora_layers import RowRun
from lora_server.model.attention_step import AttentionStep, DecodeGroup, PrefillChunk

from .decode_again import DecodeAgain, DecodeLayout, GroupBlocks
from .kv_layout import add_slots, as_tensor, int64_array, padded_blocks, split_tensor
from .step_batch import LogitsRows, StepBatch, StepRows

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Sequence

    import torch

    from .scheduler import ScheduledChunk
    from .sequence import SequenceState


class _LastStep(NamedTuple):
    """A step in which each sequence decoded."""

    chunks: Sequence[ScheduledChunk]
    """As the scheduler chose them."""
    layout: DecodeLayout


class _Single(NamedTuple):
    """A chunk of one token."""

    row: int
    position: int
    sequence: SequenceState


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
            self._again = DecodeAgain(last.layout, block_size=self._block_size)
        return self._again.next()

    def _build(self, chunks: Sequence[ScheduledChunk]) -> StepBatch:
        ordered = tuple(sorted(chunks, key=lambda chunk: chunk.sequence.adapter_order))
        rows = self._rows
        if rows is None or not _goes_on(rows, ordered):
            rows = self._rows = self._lay_out(ordered)
        device = self._device
        ids, moving = self._tokens(ordered)
        groups = self._groups(ordered)
        for group in groups:
            moving.extend(single.position for single in group)
        sizes = [len(group) for group in groups]
        position_ids, slots, *positions = split_tensor(moving, sizes, device)
        tables = [self._blocks_of(group) for group in groups]
        is_whole = len(groups) == 1 and len(groups[0]) == len(ids)
        step = StepBatch(
            rows=rows,
            input_ids=as_tensor(ids, device).unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            attention=AttentionStep(
                token_slots=slots,
                decode=tuple(
                    DecodeGroup(
                        rows=None if is_whole else self._rows_of(group),
                        blocks=as_tensor(table.blocks, device),
                        blocks_per_sequence=len(table.blocks) // len(group),
                        positions=found,
                    )
                    for group, table, found in zip(groups, tables, positions, strict=True)
                ),
                prefill=self._prefill_chunks(ordered),
            ),
        )
        layout = DecodeLayout(step, ids, moving, tables)
        self._last = _LastStep(chunks, layout) if rows.is_decode else None
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
            logits_idx=as_tensor(int64_array(idx), self._device),
            logits_rows=logits_rows,
            sampled=tuple(rows.sequence for rows in sampled),
            sampled_idx=tuple(rows.first + rows.num_prompt_rows for rows in sampled),
            is_decode=is_decode,
            is_plain=is_decode and all(map(_is_plain, ordered)),
        )

    def _tokens(self, chunks: Iterable[ScheduledChunk]) -> tuple[array[int], array[int]]:
        """Return the ids of all tokens; and their positions, then their places in the store."""
        ids, positions, slots = int64_array(), int64_array(), int64_array()
        size = self._block_size
        for sequence, count in chunks:
            start = sequence.num_computed
            if count == 1:
                ids.append(sequence.token_ids[start])
                positions.append(start)
                slots.append(sequence.block_ids[start // size] * size + start % size)
            else:
                ids.extend(sequence.token_ids[start : start + count])
                positions.extend(range(start, start + count))
                add_slots(slots, sequence.block_ids, start=start, count=count, block_size=size)
        return ids, positions + slots

    def _groups(self, chunks: Iterable[ScheduledChunk]) -> list[list[_Single]]:
        """Sequences that bring one token, grouped so that padding stays below half."""
        singles: list[_Single] = []
        row = 0
        for sequence, count in chunks:
            if count == 1:
                singles.append(_Single(row, sequence.num_computed, sequence))
            row += count
        num_blocks = [single.position // self._block_size + 1 for single in singles]
        if max(num_blocks, default=0) * len(singles) <= 2 * sum(num_blocks):
            return [singles] if singles else []
        return [[singles[i] for i in group] for group in _split_by_length(num_blocks)]

    def _blocks_of(self, group: Sequence[_Single]) -> GroupBlocks:
        width = max(single.position for single in group) // self._block_size + 1
        members = [single.sequence for single in group]
        return GroupBlocks(members, padded_blocks((s.block_ids for s in members), width))

    def _rows_of(self, group: Iterable[_Single]) -> torch.Tensor:
        return as_tensor(int64_array(single.row for single in group), self._device)

    def _prefill_chunks(self, chunks: Iterable[ScheduledChunk]) -> tuple[PrefillChunk, ...]:
        found = []
        row = 0
        for sequence, count in chunks:
            if count > 1:
                context = sequence.num_computed
                width = -(-(context + count) // self._block_size)
                blocks = as_tensor(sequence.block_ids[:width], self._device)
                found.append(
                    PrefillChunk(start=row, num_tokens=count, context=context, blocks=blocks)
                )
            row += count
        return tuple(found)


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


def _split_by_length(num_blocks: Sequence[int]) -> list[list[int]]:
    """Longest first; a new group starts where less than half of the padded length is used."""
    groups: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(num_blocks)), key=lambda i: -num_blocks[i]):
        if groups and 2 * num_blocks[i] >= longest:
            groups[-1].append(i)
        else:
            groups.append([i])
            longest = num_blocks[i]
    return groups
