"""Token ids of several sequences -> what one call of a model's body reads.

Knows neither adapters nor requests. `T` tokens, `B` sequences, `S` the longest of them.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from .pooling_attention import LengthGroup, PackedStep
from .pooling_model import PackedInputs, PaddedInputs

if TYPE_CHECKING:
    from collections.abc import Sequence


def pack(
    token_ids: Sequence[Sequence[int]], type_ids: Sequence[Sequence[int]], *, device: torch.device
) -> PackedInputs:
    """Lay sequences one after the other.

    Args:
        token_ids: the tokens of each sequence.
        type_ids: which text of a pair each of them belongs to.
        device: where the tensors are made.
    """
    lengths = [len(ids) for ids in token_ids]
    return PackedInputs(
        input_ids=_row(np.concatenate(token_ids), device),
        positions=_row(np.concatenate([np.arange(length) for length in lengths]), device),
        type_ids=_row(np.concatenate(type_ids), device),
        step=PackedStep(groups=_length_groups(lengths, device)),
    )


def pad(
    token_ids: Sequence[Sequence[int]],
    type_ids: Sequence[Sequence[int]],
    *,
    pad_token_id: int | None,
    device: torch.device,
) -> PaddedInputs:
    """Lay sequences below each other, with padding behind the shorter ones.

    Args:
        token_ids: the tokens of each sequence.
        type_ids: which text of a pair each of them belongs to.
        pad_token_id: what stands for padding; None takes 0, which nothing looks at.
        device: where the tensors are made.
    """
    shape = (len(token_ids), max(len(ids) for ids in token_ids))
    ids = np.full(shape, pad_token_id or 0, dtype=np.int64)
    types = np.zeros(shape, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.bool_)
    for row, (own, own_types) in enumerate(zip(token_ids, type_ids, strict=True)):
        ids[row, : len(own)] = own
        types[row, : len(own)] = own_types
        mask[row, : len(own)] = True
    return PaddedInputs(
        input_ids=torch.from_numpy(ids).to(device),
        type_ids=torch.from_numpy(types).to(device),
        mask=torch.from_numpy(mask).to(device),
    )


def _length_groups(lengths: Sequence[int], device: torch.device) -> tuple[LengthGroup, ...]:
    """Return the sequences by length, each group with its rows."""
    starts = list(accumulate(lengths, initial=0))
    by_length: dict[int, list[int]] = {}
    for start, length in zip(starts, lengths, strict=False):
        by_length.setdefault(length, []).append(start)
    groups = []
    for length, first_rows in by_length.items():
        count = len(first_rows)
        rows: torch.Tensor | slice = slice(first_rows[0], first_rows[0] + count * length)
        if first_rows[-1] != first_rows[0] + (count - 1) * length:
            idx = np.add.outer(np.asarray(first_rows), np.arange(length)).reshape(-1)
            rows = torch.from_numpy(idx).to(device)
        groups.append(LengthGroup(length=length, rows=rows))
    return tuple(groups)


def _row(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64, copy=False)).unsqueeze(0).to(device)
