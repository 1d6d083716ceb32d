"""What a load test sends follows from its seed and its popularity."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from lora_server.cli.bench.workload import (
    Popularity,
    Workload,
    choose_models,
    draw_pause,
    plan_requests,
    with_other_prompts,
)

MODELS = ("a", "b", "c", "d")


def workload(**changes: object) -> Workload:
    values: dict[str, Any] = {
        "models": MODELS,
        "num_prompts": 40,
        "input_len": 7,
        "output_len": 3,
        "popularity": Popularity.UNIFORM,
        "request_rate": math.inf,
        "vocab_size": 1000,
        "seed": 5,
    }
    return Workload(**{**values, **changes})


def test_the_same_seed_plans_the_same_requests_and_another_seed_others() -> None:
    assert plan_requests(workload()) == plan_requests(workload())
    assert plan_requests(workload()) != plan_requests(workload(seed=6))


def test_prompts_have_their_length_and_stay_inside_the_vocabulary() -> None:
    requests = plan_requests(workload())

    assert len(requests) == 40
    assert {len(request.prompt) for request in requests} == {7}
    assert all(256 <= token < 1000 for request in requests for token in request.prompt)
    assert len({request.prompt for request in requests}) == 40


@pytest.mark.parametrize("size", [1, 2, 256, 257])
def test_a_small_vocabulary_is_used_to_its_end(size: int) -> None:
    requests = plan_requests(workload(vocab_size=size))

    tokens = {token for request in requests for token in request.prompt}
    assert tokens == {size - 1}


def test_an_infinite_rate_sends_at_once_and_a_finite_one_in_the_mean() -> None:
    assert {request.arrival_s for request in plan_requests(workload())} == {0.0}

    arrivals = [r.arrival_s for r in plan_requests(workload(num_prompts=4000, request_rate=20.0))]

    assert arrivals == sorted(arrivals)
    # the sum of 4000 pauses has a standard deviation of 1.6 % of its mean
    assert arrivals[-1] == pytest.approx(200.0, rel=0.1)


def counts_of(popularity: Popularity, count: int = 4000) -> Counter[str]:
    chosen = choose_models(MODELS, count, popularity, random.Random(3))
    assert len(chosen) == count
    return Counter(chosen)


def test_distinct_takes_turns() -> None:
    chosen = choose_models(MODELS, 6, Popularity.DISTINCT, random.Random(3))

    assert chosen == ["a", "b", "c", "d", "a", "b"]


def test_identical_asks_for_the_first_only() -> None:
    assert counts_of(Popularity.IDENTICAL) == {"a": 4000}


def test_uniform_gives_equal_chances() -> None:
    counts = counts_of(Popularity.UNIFORM)

    # four standard deviations of a binomial distribution around its mean of 1000
    assert all(890 < counts[model] < 1110 for model in MODELS)


def test_zipf_prefers_the_first_by_the_stated_weights() -> None:
    counts = counts_of(Popularity.ZIPF)

    weights = [1 / k**1.5 for k in (1, 2, 3, 4)]
    for model, weight in zip(MODELS, weights, strict=True):
        expected = 4000 * weight / sum(weights)
        assert counts[model] == pytest.approx(expected, abs=4 * math.sqrt(expected))


@pytest.mark.parametrize("zipf_s", [0.5, 1.0, 2.0])
def test_the_exponent_of_zipf_can_be_chosen(zipf_s: float) -> None:
    chosen = choose_models(MODELS, 4000, Popularity.ZIPF, random.Random(3), zipf_s=zipf_s)

    counts = Counter(chosen)
    weights = [1 / k**zipf_s for k in (1, 2, 3, 4)]
    for model, weight in zip(MODELS, weights, strict=True):
        expected = 4000 * weight / sum(weights)
        assert counts[model] == pytest.approx(expected, abs=4 * math.sqrt(expected))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_pauses_have_the_mean_and_the_variance_of_their_distribution(burstiness: float) -> None:
    draw = random.Random(7)
    rate, count = 20.0, 20000

    pauses = np.array([draw_pause(rate, burstiness, draw) for _ in range(count)])

    variance = 1 / (rate**2 * burstiness)
    # four standard errors of the mean; the variance of a gamma's sample variance is bounded by
    # its kurtosis, 3 + 6 / shape
    assert pauses.mean() == pytest.approx(1 / rate, abs=4 * math.sqrt(variance / count))
    error = variance * math.sqrt((2 + 6 / burstiness) / count)
    assert pauses.var() == pytest.approx(variance, abs=4 * error)


def test_arrivals_of_a_poisson_process_are_counted_with_equal_mean_and_variance() -> None:
    requests = plan_requests(workload(num_prompts=20000, input_len=1, request_rate=10.0, seed=11))

    arrivals = np.array([request.arrival_s for request in requests])
    whole_seconds = int(arrivals[-1])
    counts = np.histogram(arrivals, bins=whole_seconds, range=(0, whole_seconds))[0]
    # about 2000 seconds: four standard errors of a mean and of a variance of 10
    assert counts.mean() == pytest.approx(10, abs=4 * math.sqrt(10 / whole_seconds))
    assert counts.var() == pytest.approx(10, abs=4 * 10 * math.sqrt(2.1 / whole_seconds))


def test_more_bursts_make_the_counts_vary_more() -> None:
    def spread_of(burstiness: float) -> float:
        requests = plan_requests(
            workload(num_prompts=5000, input_len=1, request_rate=10.0, burstiness=burstiness)
        )
        seconds = [int(request.arrival_s) for request in requests]
        return float(np.bincount(seconds)[:-1].var())

    assert spread_of(0.25) > 2 * spread_of(1.0) > 4 * spread_of(5.0)


def test_other_prompts_leave_models_lengths_and_times_as_they_are() -> None:
    planned = plan_requests(workload(request_rate=5.0))

    others = with_other_prompts(planned, 1000, "run 1")

    assert others == with_other_prompts(planned, 1000, "run 1")
    assert others != with_other_prompts(planned, 1000, "run 2")
    for one, other in zip(planned, others, strict=True):
        assert (one.model, one.arrival_s, one.output_len) == (
            other.model,
            other.arrival_s,
            other.output_len,
        )
        assert len(one.prompt) == len(other.prompt)
        assert one.prompt != other.prompt
