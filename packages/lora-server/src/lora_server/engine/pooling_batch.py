"""Texts of a step -> what the model's body reads, and which rows use which adapters.

Rows are ordered by adapter, so that each adapter's are consecutive. A model that takes padded
batches gets texts of similar length together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_layers import RowRun
from lora_server.model.pooling_inputs import pack, pad
from lora_server.model.pooling_model import HeadRows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lora_server.model.pooling_model import LoadedPooler, PoolingInputs

    from .pooling_sequence import PoolingSequence

_LEAST_FILL = 0.75
"""Shortest text of a padded batch, relative to its longest."""

_Adapters = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingBatch:
    """One call of the body."""

    sequences: tuple[PoolingSequence, ...]
    """In the order of their rows."""
    inputs: PoolingInputs
    token_runs: tuple[RowRun, ...]
    """Adapters of the body's rows, padding included."""
    logits_runs: tuple[RowRun, ...]
    """Adapters of the rows that the head reads."""


def build_batches(sequences: Sequence[PoolingSequence], model: LoadedPooler) -> list[PoolingBatch]:
    """Lay out a step: one batch for a model with packed attention, else one for each length."""
    if model.is_packed:
        return [_build(sequences, model)]
    groups: list[list[PoolingSequence]] = []
    for sequence in sorted(sequences, key=lambda s: -s.num_tokens):
        if groups and sequence.num_tokens >= groups[-1][0].num_tokens * _LEAST_FILL:
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    return [_build(group, model) for group in groups]


def _build(sequences: Sequence[PoolingSequence], model: LoadedPooler) -> PoolingBatch:
    ordered = tuple(sorted(sequences, key=lambda s: (_adapters(s), s.num_tokens)))
    token_ids = [s.request.token_ids for s in ordered]
    type_ids = [s.request.type_ids for s in ordered]
    longest = max(s.num_tokens for s in ordered)
    inputs: PoolingInputs
    if model.is_packed:
        inputs = pack(token_ids, type_ids, device=model.device)
    else:
        inputs = pad(token_ids, type_ids, pad_token_id=model.pad_token_id, device=model.device)
    rows = ((_adapters(s), s.num_tokens if model.is_packed else longest) for s in ordered)
    per_token = model.head is not None and model.head.rows is HeadRows.ALL
    heads = ((_adapters(s), s.num_tokens if per_token else 1) for s in ordered if s.wants_logits)
    return PoolingBatch(
        sequences=ordered, inputs=inputs, token_runs=_runs(rows), logits_runs=_runs(heads)
    )


def _adapters(sequence: PoolingSequence) -> _Adapters:
    return tuple((use.digest, use.scale) for use in sequence.request.adapters)


def _runs(rows: Iterable[tuple[_Adapters, int]]) -> tuple[RowRun, ...]:
    """Join neighbours that use the same adapters at the same scales."""
    runs: list[RowRun] = []
    for adapters, count in rows:
        before = runs.pop().num_rows if runs and runs[-1].adapters == adapters else 0
        runs.append(RowRun(num_rows=before + count, adapters=adapters))
    return tuple(runs)
