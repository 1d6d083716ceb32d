"""A step's input: one packed `[1, T]` row of tokens, and what attention and LoRA must know of it.

Sequences are ordered by adapter, so that each adapter's tokens are consecutive rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from lora_layers import RowRun
from lora_server.model.attention_step import AttentionStep, DecodeGroup, PrefillChunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .scheduler import ScheduledChunk
    from .sequence import SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsRows:
    """The rows of one sequence that reach the logits."""

    sequence: SequenceState
    first: int
    """Its first row among the step's logits."""
    num_prompt_rows: int
    """Leading rows, each of which scores the prompt token after it."""
    is_sampled: bool
    """Whether one more row follows, which chooses the next token."""

    @property
    def num_rows(self) -> int:
        """All its rows."""
        return self.num_prompt_rows + int(self.is_sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Everything a forward pass needs, in row order."""

    chunks: tuple[ScheduledChunk, ...]
    input_ids: torch.Tensor
    """`[1, T]` int64."""
    position_ids: torch.Tensor
    """`[1, T]` int64."""
    attention: AttentionStep
    token_runs: tuple[RowRun, ...]
    """Adapters of the token rows."""
    logits_runs: tuple[RowRun, ...]
    """Adapters of the rows that reach the logits."""
    logits_idx: torch.Tensor
    """`[S]` int64 token rows that reach the logits."""
    logits_rows: tuple[LogitsRows, ...]


def build_batch(
    chunks: Sequence[ScheduledChunk], *, block_size: int, device: torch.device
) -> StepBatch:
    """Lay out a step.

    Args:
        chunks: what the scheduler chose, in any order; at least one.
        block_size: tokens a KV block holds.
        device: where the tensors are made.
    """
    ordered = tuple(sorted(chunks, key=lambda chunk: _adapter_order(chunk.sequence)))
    token_ids: list[int] = []
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    for chunk in ordered:
        sequence = chunk.sequence
        start, stop = sequence.num_computed, sequence.num_computed + chunk.num_tokens
        token_ids.extend(sequence.token_ids[start:stop])
        pos = np.arange(start, stop)
        positions.append(pos)
        blocks = np.asarray(sequence.block_ids)
        slots.append(blocks[pos // block_size] * block_size + pos % block_size)
    logits_idx, logits_rows = _logits_rows(ordered)
    return StepBatch(
        chunks=ordered,
        input_ids=torch.tensor([token_ids], device=device),
        position_ids=_to_tensor(np.concatenate(positions), device).unsqueeze(0),
        attention=AttentionStep(
            token_slots=_to_tensor(np.concatenate(slots), device),
            decode=_decode_groups(ordered, block_size, device),
            prefill=_prefill_chunks(ordered, block_size, device),
        ),
        token_runs=_runs([(chunk.sequence, chunk.num_tokens) for chunk in ordered]),
        logits_runs=_runs([(rows.sequence, rows.num_rows) for rows in logits_rows]),
        logits_idx=torch.tensor(logits_idx, dtype=torch.int64, device=device),
        logits_rows=logits_rows,
    )


def _adapter_order(sequence: SequenceState) -> tuple[tuple[str, float], ...]:
    return tuple((use.digest, use.scale) for use in sequence.adapters)


def _to_tensor(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64, copy=False)).to(device, non_blocking=True)


def _runs(rows: Sequence[tuple[SequenceState, int]]) -> tuple[RowRun, ...]:
    """Join neighbours that use the same adapters at the same scales."""
    runs: list[RowRun] = []
    for sequence, count in rows:
        adapters = _adapter_order(sequence)
        if runs and runs[-1].adapters == adapters:
            count += runs.pop().num_rows  # noqa: PLW2901 - the run grows
        runs.append(RowRun(num_rows=count, adapters=adapters))
    return tuple(runs)


def _logits_rows(
    chunks: Sequence[ScheduledChunk],
) -> tuple[list[int], tuple[LogitsRows, ...]]:
    """Token rows whose logits are wanted, and whose they are."""
    idx: list[int] = []
    found: list[LogitsRows] = []
    row = 0
    for chunk in chunks:
        sequence, count = chunk.sequence, chunk.num_tokens
        stop = sequence.num_computed + count
        is_sampled = stop == sequence.num_tokens
        num_prompt_rows = 0
        if sequence.needs_prompt_rows:
            # The last prompt token has no successor in the prompt: its row samples.
            last = min(stop, sequence.num_prompt_tokens - 1)
            num_prompt_rows = max(last - sequence.num_computed, 0)
        if num_prompt_rows or is_sampled:
            rows = LogitsRows(
                sequence=sequence,
                first=len(idx),
                num_prompt_rows=num_prompt_rows,
                is_sampled=is_sampled,
            )
            found.append(rows)
            idx.extend(range(row, row + num_prompt_rows))
            idx.extend([row + count - 1] * is_sampled)
        row += count
    return idx, tuple(found)


def _decode_groups(
    chunks: Sequence[ScheduledChunk], block_size: int, device: torch.device
) -> tuple[DecodeGroup, ...]:
    """Sequences that bring one token, grouped so that padding stays below half."""
    entries: list[tuple[int, int, SequenceState]] = []  # (blocks, row, sequence)
    row = 0
    for chunk in chunks:
        if chunk.num_tokens == 1:
            blocks = chunk.sequence.num_computed // block_size + 1
            entries.append((blocks, row, chunk.sequence))
        row += chunk.num_tokens
    if not entries:
        return ()
    longest = max(blocks for blocks, _, _ in entries)
    if longest * len(entries) <= 2 * sum(blocks for blocks, _, _ in entries):
        groups = [entries]
    else:
        groups = _split_by_length(entries)
    is_whole = len(groups) == 1 and len(entries) == row
    return tuple(_decode_group(group, device, is_whole=is_whole) for group in groups)


def _split_by_length(
    entries: list[tuple[int, int, SequenceState]],
) -> list[list[tuple[int, int, SequenceState]]]:
    """Longest first; a new group starts where less than half of the padded length is used."""
    groups: list[list[tuple[int, int, SequenceState]]] = []
    for entry in sorted(entries, key=lambda e: -e[0]):
        if groups and entry[0] * 2 >= groups[-1][0][0]:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return groups


def _decode_group(
    entries: Sequence[tuple[int, int, SequenceState]], device: torch.device, *, is_whole: bool
) -> DecodeGroup:
    width = max(blocks for blocks, _, _ in entries)
    table = np.empty((len(entries), width), dtype=np.int64)
    for i, (blocks, _, sequence) in enumerate(entries):
        ids = sequence.block_ids[:blocks]
        table[i, :blocks] = ids
        table[i, blocks:] = ids[0]
    rows = None if is_whole else torch.tensor([row for _, row, _ in entries], device=device)
    return DecodeGroup(
        rows=rows,
        blocks=_to_tensor(table.reshape(-1), device),
        blocks_per_sequence=width,
        positions=torch.tensor([s.num_computed for _, _, s in entries], device=device),
    )


def _prefill_chunks(
    chunks: Sequence[ScheduledChunk], block_size: int, device: torch.device
) -> tuple[PrefillChunk, ...]:
    found = []
    row = 0
    for chunk in chunks:
        if chunk.num_tokens > 1:
            context = chunk.sequence.num_computed
            blocks = -(-(context + chunk.num_tokens) // block_size)
            found.append(
                PrefillChunk(
                    start=row,
                    num_tokens=chunk.num_tokens,
                    context=context,
                    blocks=torch.tensor(chunk.sequence.block_ids[:blocks], device=device),
                )
            )
        row += chunk.num_tokens
    return tuple(found)
