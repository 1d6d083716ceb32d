"""The sampler against exact probabilities, float64 arithmetic and transformers' warpers.

`B` rows, `V` vocabulary.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lora_server.engine.request import SamplingParams
from lora_server.engine.sampler import NUCLEUS_CANDIDATES, Sampler, SamplerRow

VOCAB = 24
END = 2


def make_row(
    *,
    prompt: tuple[int, ...] = (1, 3),
    output: tuple[int, ...] = (),
    seed: int = 0,
    **fields: Any,
) -> SamplerRow:
    sampling = SamplingParams(max_tokens=8, **fields)
    return SamplerRow(
        sampling=sampling,
        prompt_token_ids=prompt,
        output_token_ids=output,
        generator=None if sampling.is_greedy else torch.Generator().manual_seed(seed),
        end_token_ids=frozenset({END}),
    )


def make_logits(num_rows: int = 1, *, vocab: int = VOCAB, seed: int = 5) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draw(logits_BV: torch.Tensor, row: SamplerRow, times: int) -> list[int]:
    batch = logits_BV.expand(times, -1)
    return [token.token_id for token in Sampler().sample(batch, [row] * times)]


def assert_follows(drawn: list[int], probabilities: list[float]) -> None:
    """Chi-square over all tokens of positive probability, at five standard deviations."""
    counts = torch.bincount(torch.tensor(drawn), minlength=len(probabilities)).tolist()
    expected = [p * len(drawn) for p in probabilities]
    assert all(n == 0 for n, e in zip(counts, expected, strict=True) if e == 0)
    terms = [(n - e) ** 2 / e for n, e in zip(counts, expected, strict=True) if e > 0]
    freedom = len(terms) - 1
    assert sum(terms) <= freedom + 5 * math.sqrt(2 * freedom)


def warped(logits_BV: torch.Tensor, *warpers: LogitsProcessor) -> list[float]:
    chain = LogitsProcessorList(warpers)
    scores_BV = chain(torch.tensor([[0]]), logits_BV.double())  # type: ignore[arg-type]
    probabilities: list[float] = scores_BV.softmax(dim=-1)[0].tolist()
    return probabilities


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_largest_logit_and_the_lowest_id_among_equal_ones(
    dtype: torch.dtype,
) -> None:
    logits_BV = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, 1.0, 5.0, 5.0]], dtype=dtype)

    tokens = Sampler().sample(logits_BV, [make_row(temperature=0.0)] * 2)

    assert [token.token_id for token in tokens] == [1, 0]
    assert [token.logprob for token in tokens] == [None, None]


def test_ties_of_a_processed_greedy_row_also_go_to_the_lowest_id() -> None:
    logits_BV = torch.tensor([[0.0, 1.0, 2.0, 1.0]])
    row = make_row(temperature=0.0, logit_bias=MappingProxyType({2: -5.0}))

    assert Sampler().sample(logits_BV, [row])[0].token_id == 1


def test_the_logits_are_left_as_they_were() -> None:
    logits_BV = make_logits(3)
    before = logits_BV.clone()
    rows = [
        make_row(temperature=0.0, frequency_penalty=1.0, output=(4, 5)),
        make_row(temperature=0.5, top_k=3, logit_bias=MappingProxyType({1: 2.0})),
        make_row(temperature=0.0, min_tokens=3),
    ]

    Sampler().sample(logits_BV, rows)

    assert torch.equal(logits_BV, before)


def test_no_rows_give_no_tokens() -> None:
    assert Sampler().sample(torch.zeros(0, VOCAB), []) == []


@pytest.mark.parametrize(
    ("fields", "warpers"),
    [
        ({}, []),
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
        ({"temperature": 1.7}, [TemperatureLogitsWarper(1.7)]),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_k": 10 * VOCAB}, []),
        ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        ({"top_p": 1e-9}, [TopPLogitsWarper(1e-9)]),
        ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        (
            {"temperature": 1.5, "min_p": 0.05, "top_k": 12, "top_p": 0.8},
            [
                TemperatureLogitsWarper(1.5),
                MinPLogitsWarper(0.05),
                TopKLogitsWarper(12),
                TopPLogitsWarper(0.8),
            ],
        ),
    ],
    ids=[
        "plain",
        "cold",
        "hot",
        "top_k",
        "top_k of everything",
        "top_p",
        "top_p of one token",
        "min_p",
        "all of them",
    ],
)
def test_draws_follow_the_exact_distribution(
    fields: dict[str, Any], warpers: list[LogitsProcessor]
) -> None:
    logits_BV = make_logits()

    drawn = draw(logits_BV, make_row(seed=11, **fields), 6_000)

    assert_follows(drawn, warped(logits_BV, *warpers))


def test_a_nucleus_wider_than_the_candidates_is_still_exact() -> None:
    vocab = 3 * NUCLEUS_CANDIDATES
    logits_BV = make_logits(vocab=vocab) * 0.01
    row = make_row(seed=3, top_p=0.9)

    drawn = draw(logits_BV, row, 200)

    allowed = {v for v, p in enumerate(warped(logits_BV, TopPLogitsWarper(0.9))) if p > 0}
    assert len(allowed) > NUCLEUS_CANDIDATES
    assert set(drawn) <= allowed
    smallest_candidate = logits_BV[0].topk(NUCLEUS_CANDIDATES).values[-1]
    assert any(logits_BV[0, v] < smallest_candidate for v in drawn)


def test_equal_logits_at_the_border_of_top_k_all_stay() -> None:
    logits_BV = torch.tensor([[0.0, 1.0, 1.0, 1.0, -50.0]])

    drawn = draw(logits_BV, make_row(seed=4, top_k=2), 300)

    assert set(drawn) == {1, 2, 3}


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits_BV = make_logits() * 1e4

    drawn = draw(logits_BV, make_row(temperature=1e-30), 20)

    assert set(drawn) == {int(logits_BV.argmax())}


MIXED_FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.2},
    {"temperature": 0.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "top_k": 1500, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.999},
]


def test_a_seeded_row_draws_the_same_tokens_alone_and_among_any_neighbours() -> None:
    # Rounded to bfloat16, so that equal logits abound.
    steps = [make_logits(8, vocab=5000, seed=s).bfloat16() for s in range(6)]

    def play(order: list[int]) -> dict[int, list[int]]:
        rows = {b: make_row(seed=100 + b, output=(5, 6), **MIXED_FIELDS[b]) for b in order}
        played: dict[int, list[int]] = {b: [] for b in order}
        for logits_BV in steps:
            tokens = Sampler().sample(logits_BV[order], [rows[b] for b in order])
            for b, token in zip(order, tokens, strict=True):
                played[b].append(token.token_id)
        return played

    together = play(list(range(8)))

    assert play([7, 2, 5, 0, 3, 6, 1, 4]) == together
    for b in range(8):
        assert play([b]) == {b: together[b]}


def test_the_seed_decides() -> None:
    logits_BV = make_logits()

    first, same, other = (draw(logits_BV, make_row(seed=s), 40) for s in (1, 1, 2))

    assert first == same
    assert first != other


def test_a_random_row_without_generator_is_our_own_mistake() -> None:
    row = SamplerRow(
        sampling=SamplingParams(max_tokens=1),
        prompt_token_ids=(1,),
        output_token_ids=(),
        generator=None,
        end_token_ids=frozenset(),
    )

    with pytest.raises(AssertionError, match="has a generator"):
        Sampler().sample(make_logits(), [row])


def scores_seen_by(logits_BV: torch.Tensor, row_fields: dict[str, Any]) -> list[float]:
    """Recover the processed scores of a row from its greedy choices.

    A token is the greedy choice once its bias lifts it over all others, so bisecting the bias
    that makes it win measures how far its processed score lies below the best of the others.
    """
    given = dict(row_fields.pop("logit_bias", {}))

    def wins(token_id: int, lift: float) -> bool:
        bias = {**given, token_id: given.get(token_id, 0.0) + lift}
        row = make_row(temperature=0.0, logit_bias=MappingProxyType(bias), **row_fields)
        return Sampler().sample(logits_BV.double().float(), [row])[0].token_id == token_id

    lifts = []
    for token_id in range(logits_BV.shape[1]):
        low, high = -64.0, 64.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if wins(token_id, middle) else (middle, high)
        lifts.append(high)
    return lifts


def lifts_needed(scores: list[float]) -> list[float]:
    return [
        max(score for other, score in enumerate(scores) if other != v) - scores[v]
        for v in range(len(scores))
    ]


def test_presence_and_frequency_penalties_equal_float64_arithmetic() -> None:
    logits_BV = make_logits(vocab=8)
    output = (3, 3, 3, 5)

    found = scores_seen_by(
        logits_BV, {"presence_penalty": 0.4, "frequency_penalty": 0.3, "output": output}
    )

    exact = [
        float(logit) - 0.3 * output.count(v) - 0.4 * (v in output)
        for v, logit in enumerate(logits_BV[0].tolist())
    ]
    assert found == pytest.approx(lifts_needed(exact), abs=1e-5)


def test_presence_penalty_ignores_the_prompt() -> None:
    logits_BV = torch.tensor([[0.0, 1.0, 0.5]])
    row = make_row(temperature=0.0, prompt=(1, 1), presence_penalty=2.0, frequency_penalty=2.0)

    assert Sampler().sample(logits_BV, [row])[0].token_id == 1


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_equals_transformers_on_prompt_and_output(penalty: float) -> None:
    logits_BV = make_logits(seed=6)
    prompt, output = (1, 3, 3), (7, 9)
    row = make_row(seed=2, prompt=prompt, output=output, repetition_penalty=penalty)

    drawn = draw(logits_BV, row, 6_000)

    oracle = RepetitionPenaltyLogitsProcessor(penalty)
    scores = oracle(torch.tensor([prompt + output]), logits_BV.double())
    assert_follows(drawn, scores.softmax(dim=-1)[0].tolist())


def test_repetition_comes_before_the_other_penalties_and_after_the_bias() -> None:
    logit, bias = 1.5, 0.7
    logits_BV = torch.tensor([[logit, 0.0]])
    row = make_row(
        seed=8,
        prompt=(),
        output=(0,),
        logit_bias=MappingProxyType({0: bias}),
        repetition_penalty=2.0,
        presence_penalty=0.25,
        temperature=0.5,
    )

    drawn = draw(logits_BV, row, 6_000)

    score = ((logit + bias) / 2.0 - 0.25) / 0.5
    share = 1 / (1 + math.exp(-score))
    assert_follows(drawn, [share, 1 - share])


def test_prompt_tokens_beyond_the_head_are_skipped_by_the_repetition_penalty() -> None:
    row = make_row(temperature=0.0, prompt=(VOCAB + 3, 1), repetition_penalty=1.5)

    token = Sampler().sample(make_logits(), [row])[0]

    assert 0 <= token.token_id < VOCAB


def test_end_and_stop_tokens_wait_for_min_tokens() -> None:
    logits_BV = torch.tensor([[0.0, 1.0, 9.0, 8.0]])
    fields: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": frozenset({3})}

    early = Sampler().sample(logits_BV, [make_row(output=(1,), **fields)])[0]
    late = Sampler().sample(logits_BV, [make_row(output=(1, 1), **fields)])[0]

    assert early.token_id == 1
    assert late.token_id == END


def test_logit_bias_can_force_and_forbid() -> None:
    logits_BV = make_logits()
    best = int(logits_BV.argmax())

    forced = make_row(seed=1, logit_bias=MappingProxyType({4: 100.0}))
    forbidden = make_row(seed=1, logit_bias=MappingProxyType({best: -100.0}))

    assert set(draw(logits_BV, forced, 50)) == {4}
    assert best not in draw(logits_BV, forbidden, 500)


def test_logprobs_are_those_of_the_raw_distribution_and_only_where_asked_for() -> None:
    logits_BV = make_logits(3)
    rows = [
        make_row(seed=1, temperature=0.3, top_k=2, logprobs=3),
        make_row(temperature=0.0),
        make_row(temperature=0.0, logit_bias=MappingProxyType({4: 100.0}), logprobs=0),
    ]

    tokens = Sampler().sample(logits_BV, rows)

    exact = logits_BV.double().log_softmax(dim=-1)
    assert tokens[1].logprob is None
    for b in (0, 2):
        entry = tokens[b].logprob
        assert entry is not None
        assert entry.token_id == tokens[b].token_id
        assert entry.logprob == pytest.approx(float(exact[b, tokens[b].token_id]), abs=1e-5)
        assert len(entry.top) == (3 if b == 0 else 0)
    assert tokens[2].token_id == 4
