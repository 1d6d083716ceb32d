"""Chooses the next token of every row of a step.

Knows nothing of models, adapters or scheduling. `B` rows, `V` vocabulary, `C` candidates.

The order is vLLM's, and the caller sees the same text for the same parameters there:

1. log-probabilities are taken from the raw logits, so nothing below shows in them;
2. the logits become float32;
3. `min_tokens` masks end and stop tokens, `logit_bias` is added;
4. penalties: repetition, then frequency and presence;
5. greedy rows take the largest logit here, the lowest token id among equal ones;
6. temperature;
7. `min_p`, relative to the most likely token;
8. `top_k`, then `top_p` on what `top_k` left;
9. one uniform number from the request's own generator picks the token.

Step 9 inverts the cumulative distribution: it takes exactly one number a token from the generator,
and sums every row by itself, so that a seeded request draws the same tokens in any batch.

transformers has warpers for steps 6 to 8. They sort the whole vocabulary for `top_p`, for one set
of parameters at a time; finding the largest 1024 of 49152 takes an eighth of that time on a CPU.
So they are the oracle in the tests, and not used here.
"""
# ruff: noqa: N803, N806 -- tensors carry their axes as a suffix

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from lora_server.engine.logprobs import token_logprobs
from lora_server.model.greedy import find_largest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from lora_server.engine.messages import TokenLogprob
    from lora_server.engine.request import SamplingParams

NUCLEUS_CANDIDATES = 1024
"""Largest logits looked at first for `top_p`; rows whose nucleus is wider are sorted whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRow:
    """What decides one row's token, besides its logits."""

    sampling: SamplingParams
    prompt_token_ids: Sequence[int]
    """Counts for the repetition penalty."""
    output_token_ids: Sequence[int]
    """Tokens generated so far: count for all penalties and for `min_tokens`."""
    generator: torch.Generator | None
    """The request's own source of randomness, on any device; None for greedy requests only."""
    end_token_ids: frozenset[int]
    """The model's end tokens."""


class SampledToken(NamedTuple):
    """The token of one row."""

    token_id: int
    logprob: TokenLogprob | None = None
    """None unless the request asks for log-probabilities."""


class Sampler:
    """Chooses one token a row; keeps nothing between calls."""

    def sample(
        self,
        logits_BV: Tensor,
        rows: Sequence[SamplerRow],
    ) -> list[SampledToken]:
        """Choose the next token of every row.

        Args:
            logits_BV: raw logits of any floating dtype, `[B, V]`; not changed.
            rows: one a row of the logits. Token ids in `logit_bias`, end and stop tokens are
                below `V`; the caller has checked it.

        Returns:
            One token a row. A row's token depends on its logits and its `SamplerRow` alone, and
            each random row has advanced its generator by one number.
        """
        assert logits_BV.shape[0] == len(rows), "one SamplerRow for every row of logits"
        token_ids = _choose(logits_BV, rows)
        logprobs = _requested_logprobs(logits_BV, rows, token_ids)
        return [SampledToken(*pair) for pair in zip(token_ids, logprobs, strict=True)]


def _requested_logprobs(
    logits_BV: Tensor,
    rows: Sequence[SamplerRow],
    token_ids: Sequence[int],
) -> list[TokenLogprob | None]:
    """Take the log-probabilities of those rows that ask for them."""
    tops = {b: row.sampling.logprobs for b, row in enumerate(rows)}
    asking = {b: top for b, top in tops.items() if top is not None}
    results: list[TokenLogprob | None] = [None] * len(rows)
    if asking:
        wanted = list(asking)
        found = token_logprobs(
            _pick(logits_BV, wanted), [token_ids[b] for b in wanted], list(asking.values())
        )
        for b, logprob in zip(wanted, found, strict=True):
            results[b] = logprob
    return results


def _choose(
    logits_BV: Tensor,
    rows: Sequence[SamplerRow],
) -> list[int]:
    """Split the rows by how much work they need; one batched operation for each kind."""
    is_shaped = [_is_shaped(row) for row in rows]
    shaped = [b for b, needs_work in enumerate(is_shaped) if needs_work]
    plain = [b for b, needs_work in enumerate(is_shaped) if not needs_work]
    chosen = [0] * len(rows)
    _store(chosen, plain, lambda: find_largest(_pick(logits_BV, plain)).token_ids)
    if not shaped:
        return chosen

    scores_BV = logits_BV[shaped].float()
    for scores_V, b in zip(scores_BV, shaped, strict=True):
        _apply_bias_(scores_V, rows[b])
        _apply_penalties_(scores_V, rows[b])
    greedy = [i for i, b in enumerate(shaped) if rows[b].sampling.is_greedy]
    random = [i for i, b in enumerate(shaped) if not rows[b].sampling.is_greedy]
    at = [shaped[i] for i in greedy]
    _store(chosen, at, lambda: find_largest(_pick(scores_BV, greedy)).token_ids)
    at = [shaped[i] for i in random]
    _store(chosen, at, lambda: _draw(_pick(scores_BV, random), [rows[b] for b in at]).tolist())
    return chosen


def _store(chosen: list[int], at: Sequence[int], compute: Callable[[], list[int]]) -> None:
    """Write the computed tokens to their rows; compute nothing for no rows."""
    if at:
        for b, token_id in zip(at, compute(), strict=True):
            chosen[b] = token_id


def _pick(x_BV: Tensor, at: Sequence[int]) -> Tensor:
    """Return the named rows; the tensor itself when that is all of them."""
    return x_BV if len(at) == x_BV.shape[0] else x_BV[list(at)]


def _is_shaped(row: SamplerRow) -> bool:
    """Whether the token is anything but the largest raw logit."""
    sampling = row.sampling
    return not sampling.is_greedy or bool(
        sampling.logit_bias
        or len(row.output_token_ids) < sampling.min_tokens
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


def _apply_bias_(scores_V: Tensor, row: SamplerRow) -> None:
    """Forbid ending before `min_tokens`, and add `logit_bias`."""
    sampling = row.sampling
    if len(row.output_token_ids) < sampling.min_tokens:
        ends = sorted(row.end_token_ids | sampling.stop_token_ids)
        scores_V[torch.tensor(ends, dtype=torch.long, device=scores_V.device)] = -torch.inf
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=scores_V.device)
        scores_V[ids] += torch.tensor(
            list(sampling.logit_bias.values()), dtype=torch.float32, device=scores_V.device
        )


def _apply_penalties_(scores_V: Tensor, row: SamplerRow) -> None:
    """Make tokens that occurred less likely (or more, when the penalty says so)."""
    sampling = row.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(
            sorted({*row.prompt_token_ids, *row.output_token_ids}), device=scores_V.device
        )
        # A prompt may hold tokens the head cannot produce (a larger embedding).
        seen = seen[seen < scores_V.shape[0]]
        factor = sampling.repetition_penalty
        found = scores_V[seen]
        scores_V[seen] = torch.where(found > 0, found / factor, found * factor)
    if row.output_token_ids and (sampling.frequency_penalty or sampling.presence_penalty):
        counts = Counter(row.output_token_ids)
        ids = torch.tensor(list(counts), device=scores_V.device)
        times = torch.tensor(list(counts.values()), device=scores_V.device)
        scores_V[ids] -= times * sampling.frequency_penalty + sampling.presence_penalty


def _draw(scores_BV: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Draw a token from every row: temperature, `min_p`, `top_k`, `top_p`, then one number each.

    Args:
        scores_BV: float32 logits after penalties, `[B, V]`.
        rows: random requests.

    Returns:
        Token ids, `[B]`.
    """
    samplings = [row.sampling for row in rows]
    temperature_B1 = _column(scores_BV, [sampling.temperature for sampling in samplings])
    min_p_B1 = _column(scores_BV, [sampling.min_p for sampling in samplings])
    # Weights relative to the most likely token: a tiny temperature cannot overflow.
    largest_B1 = scores_BV.amax(dim=-1, keepdim=True)
    weights_BV = ((scores_BV - largest_B1) / temperature_B1).exp_()
    weights_BV.masked_fill_(weights_BV < min_p_B1, 0.0)

    cut = [b for b, sampling in enumerate(samplings) if _is_truncated(sampling)]
    if cut:
        weights_BV[cut] = _truncate(_pick(weights_BV, cut), [samplings[b] for b in cut])
    uniform_B = torch.tensor([_uniform(row) for row in rows], dtype=torch.float64)
    return _invert(weights_BV, uniform_B.to(scores_BV.device).unsqueeze(1))


def _is_truncated(sampling: SamplingParams) -> bool:
    """Whether `top_k` or `top_p` may remove anything."""
    return sampling.top_k > 0 or sampling.top_p < 1.0


def _truncate(weights_BV: Tensor, samplings: Sequence[SamplingParams]) -> Tensor:
    """Zero all but the `top_k` largest weights and, of these, the fewest whose share is `top_p`.

    Both bounds are turned into the smallest weight kept, so that equal weights stay or go
    together, whatever order a sort leaves them in.

    Args:
        weights_BV: not negative, `[B, V]`.
        samplings: one a row.

    Returns:
        New weights, `[B, V]`.
    """
    vocab_size = weights_BV.shape[1]
    top_ks = [min(sampling.top_k or vocab_size, vocab_size) for sampling in samplings]
    limited = [top_k for top_k in top_ks if top_k < vocab_size]
    num_candidates = min(max([NUCLEUS_CANDIDATES, *limited]), vocab_size)
    sorted_BC = weights_BV.topk(num_candidates, dim=-1).values
    kth_B1 = sorted_BC.gather(
        1, torch.tensor(top_ks, device=sorted_BC.device).clamp_(max=num_candidates)[:, None] - 1
    )
    is_limited_B1 = _column(weights_BV, [float(top_k < vocab_size) for top_k in top_ks])
    weights_BV = weights_BV.masked_fill(weights_BV < kth_B1 * is_limited_B1, 0.0)
    nucleus = [b for b, sampling in enumerate(samplings) if sampling.top_p < 1.0]
    for b in nucleus:
        floor = _nucleus_floor(weights_BV[b], sorted_BC[b], samplings[b].top_p)
        weights_BV[b].masked_fill_(weights_BV[b] < floor, 0.0)
    return weights_BV


def _nucleus_floor(weights_V: Tensor, sorted_C: Tensor, top_p: float) -> Tensor:
    """Return the smallest weight that stays: the larger ones hold less than `top_p` of the row.

    The largest candidates suffice when they hold that share; else the row is sorted whole. Each
    row is summed by itself, since a sum over several rows may add in another order.

    Args:
        weights_V: what `top_k` left, `[V]`.
        sorted_C: the largest of all weights, descending, `[C]`.
        top_p: in (0, 1).

    Returns:
        A scalar tensor.
    """
    needed = weights_V.sum(dtype=torch.float64) * top_p
    cumulative_C = sorted_C.cumsum(dim=0, dtype=torch.float64)
    if bool(cumulative_C[-1] < needed):
        sorted_C = weights_V.sort(descending=True).values
        cumulative_C = sorted_C.cumsum(dim=0, dtype=torch.float64)
    position = torch.searchsorted(cumulative_C, needed)
    return sorted_C[position.clamp(max=sorted_C.shape[0] - 1)]


def _invert(weights_BC: Tensor, uniform_B1: Tensor) -> Tensor:
    """Return the position where the cumulative weight of each row first exceeds `uniform` of it.

    Args:
        weights_BC: not negative, not all zero, `[B, C]`.
        uniform_B1: in [0, 1), float64, `[B, 1]`.

    Returns:
        Positions of positive weight, `[B]`.
    """
    cumulative_BC = weights_BC.cumsum(dim=-1, dtype=torch.float64)
    total_B1 = cumulative_BC[:, -1:]
    # The product may round up to the total, beyond which there is no position.
    below_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    threshold_B1 = torch.minimum(uniform_B1 * total_B1, below_B1)
    found_B1 = torch.searchsorted(cumulative_BC, threshold_B1, right=True)
    # Logits that are not numbers end here too; the token is then meaningless but exists.
    return found_B1.squeeze(1).clamp(max=weights_BC.shape[1] - 1)


def _uniform(row: SamplerRow) -> float:
    """Take one number from the request's own generator."""
    assert row.generator is not None, "a request that is not greedy has a generator"
    number = torch.rand(
        (), generator=row.generator, dtype=torch.float64, device=row.generator.device
    )
    return float(number)


def _column(like_BV: Tensor, values: Sequence[float]) -> Tensor:
    """Return the values as a float32 column beside the logits, `[B, 1]`."""
    return torch.tensor(values, dtype=torch.float32, device=like_BV.device).unsqueeze(1)
