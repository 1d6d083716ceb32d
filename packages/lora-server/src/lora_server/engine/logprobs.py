"""Log-probabilities of chosen tokens, their rank, and the most likely alternatives.

Knows nothing of requests or sampling: the numbers are those of the model's own distribution.
`B` rows of logits, `V` vocabulary.
"""
# ruff: noqa: N803, N806 -- tensors carry their axes as a suffix

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import torch

from lora_server.engine.messages import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

ROWS_PER_CHUNK = 64
"""Rows turned into float32 at a time: a long prompt times a large vocabulary would be gigabytes."""


def token_logprobs(
    logits_BV: Tensor,
    token_ids: Sequence[int],
    num_top: int | Sequence[int],
) -> list[TokenLogprob]:
    """Report how likely the model found one token of each row.

    The softmax is taken in float32 whatever the dtype of the logits. Equal logits count as one
    rank, and stand in the order of their token ids among the alternatives.

    Args:
        logits_BV: what the model returned, before any bias, penalty or temperature, `[B, V]`.
        token_ids: the token of each row, `B` of them, each below `V`.
        num_top: how many alternatives to report, for all rows or for each.

    Returns:
        One entry a row.

    Raises:
        ValueError: the counts of rows, tokens and alternatives differ.
    """
    num_rows = logits_BV.shape[0]
    tops = [num_top] * num_rows if isinstance(num_top, int) else list(num_top)
    if not len(token_ids) == len(tops) == num_rows:
        raise ValueError(
            f"{num_rows} rows of logits, {len(token_ids)} tokens and {len(tops)} counts of "
            "alternatives: expected one of each for every row"
        )
    return [
        entry
        for first in range(0, num_rows, ROWS_PER_CHUNK)
        for entry in _chunk(
            logits_BV[first : first + ROWS_PER_CHUNK],
            token_ids[first : first + ROWS_PER_CHUNK],
            tops[first : first + ROWS_PER_CHUNK],
        )
    ]


def _chunk(
    logits_BV: Tensor,
    token_ids: Sequence[int],
    tops: Sequence[int],
) -> Iterator[TokenLogprob]:
    """As `token_logprobs`, for few enough rows to hold in float32."""
    logprobs_BV = logits_BV.float().log_softmax(dim=-1)
    ids_B1 = torch.tensor(token_ids, device=logits_BV.device).unsqueeze(1)
    chosen_B1 = logprobs_BV.gather(1, ids_B1)
    ranks = ((logprobs_BV > chosen_B1).sum(dim=1) + 1).tolist()
    best = _most_likely(logprobs_BV, tops)
    chosen = chosen_B1.squeeze(1).tolist()
    for token_id, logprob, rank, top in zip(token_ids, chosen, ranks, best, strict=True):
        yield TokenLogprob(token_id=token_id, logprob=logprob, rank=rank, top=top)


def _most_likely(
    logprobs_BV: Tensor,
    tops: Sequence[int],
) -> list[tuple[tuple[int, float], ...]]:
    """Name the `tops[b]` most likely tokens of each row; equal ones by ascending token id.

    `torch.topk` leaves open which of several equal entries it returns, and bfloat16 logits are
    often equal. So only its last value is used: everything not below it is a candidate.
    """
    widest = min(max(tops, default=0), logprobs_BV.shape[1])
    if widest == 0:
        return [()] * len(tops)
    floor_B1 = logprobs_BV.topk(widest, dim=1).values[:, -1:]
    where = (logprobs_BV >= floor_B1).nonzero()
    values = logprobs_BV[where[:, 0], where[:, 1]].tolist()
    candidates: list[list[tuple[int, float]]] = [[] for _ in tops]
    for (row, token_id), value in zip(where.tolist(), values, strict=True):
        candidates[row].append((token_id, value))
    return [
        tuple(islice(sorted(entries, key=lambda entry: (-entry[1], entry[0])), top))
        for entries, top in zip(candidates, tops, strict=True)
    ]
