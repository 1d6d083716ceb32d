"""The figures of load tests, from answers with known times, against NumPy."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_server.cli.bench.client import Answer
from lora_server.cli.bench.figures import percentile, spread, summarise_runs
from lora_server.cli.bench.goodput import Objective
from lora_server.cli.bench.load import LoadResult

if TYPE_CHECKING:
    from collections.abc import Sequence


def answer(
    *times: float, model: str = "a", tokens: int | None = None, counted: bool = True, asked: int = 3
) -> Answer:
    return Answer(
        model=model,
        token_times_s=times,
        duration_s=times[-1],
        output_tokens=len(times) if tokens is None else tokens,
        is_counted_by_server=counted,
        input_tokens=10,
        asked_tokens=asked,
    )


def summarised(*answers: Answer, objectives: Sequence[Objective] = ()) -> dict[str, Any]:
    return summarise_runs([LoadResult(answers=answers, duration_s=2.0)], objectives)


def test_throughput_counts_answered_requests_over_the_whole_time() -> None:
    figures = summarised(answer(0.1, 0.2, 0.4), answer(0.3, 0.5, 0.7))

    assert figures["output_tokens_per_s"] == 3.0
    assert figures["requests_per_s"] == 1.0
    assert figures["total_tokens_per_s"] == 13.0
    assert (figures["completed"], figures["failed"]) == (2, 0)
    assert (figures["input_tokens"], figures["output_tokens"]) == (20, 6)


def test_latencies_are_in_milliseconds() -> None:
    figures = summarised(answer(0.1, 0.2, 0.4), answer(0.3, 0.5, 0.7))

    assert figures["ttft_ms"]["mean"] == pytest.approx(200)
    assert figures["tpot_ms"]["mean"] == pytest.approx(175)
    assert figures["itl_ms"]["mean"] == pytest.approx(175)
    assert figures["itl_ms"]["p50"] == pytest.approx(200)


def test_time_per_token_uses_the_servers_count_when_an_event_holds_several_tokens() -> None:
    figures = summarised(answer(0.1, 0.5, tokens=5))

    assert figures["tpot_ms"]["mean"] == pytest.approx(100)
    assert figures["itl_ms"]["mean"] == pytest.approx(400)


def test_failures_are_counted_by_message_and_not_in_the_latencies() -> None:
    failed = [Answer(model="b", error="404: no b"), Answer(model="b", error="404: no b")]

    figures = summarised(answer(0.1, 0.2, 0.4), *failed)

    assert figures["errors"] == [{"message": "404: no b", "count": 2}]
    assert (figures["completed"], figures["failed"]) == (1, 2)
    assert figures["requests_per_model"] == {"a": 1, "b": 2}
    assert figures["ttft_ms"]["p99"] == pytest.approx(100)


def test_nothing_measured_is_null() -> None:
    figures = summarised(Answer(model="a", error="x"))

    assert figures["ttft_ms"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert figures["output_tokens_per_s"] == 0
    assert json.loads(json.dumps(figures)) == figures


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    assert summarised(answer(0.1))["tpot_ms"]["mean"] is None


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=50), st.sampled_from([0, 1, 50, 90, 99]))
def test_percentiles_are_numpys(values: list[float], percent: int) -> None:
    expected = float(np.percentile(values, percent))

    assert percentile(sorted(values), percent) == pytest.approx(expected, abs=1e-9)


def test_a_single_value_is_all_its_percentiles() -> None:
    assert spread([0.25]) == {"mean": 250, "p50": 250, "p90": 250, "p99": 250}


def many_answers(count: int, seed: int) -> list[Answer]:
    draw = random.Random(seed)
    answers = []
    for _ in range(count):
        pauses = [draw.expovariate(20) for _ in range(draw.randint(1, 9))]
        times = np.cumsum(pauses).tolist()
        answers.append(answer(*times, model=draw.choice("abc"), asked=9))
    return answers


def test_every_figure_of_many_answers_is_numpys() -> None:
    answers = many_answers(300, seed=1)

    figures = summarised(*answers)

    ttfts = np.array([a.token_times_s[0] for a in answers]) * 1000
    ends = np.array([a.token_times_s[-1] for a in answers]) * 1000
    several = [a.token_times_s for a in answers if len(a.token_times_s) > 1]
    tpots = np.array([(t[-1] - t[0]) / (len(t) - 1) for t in several]) * 1000
    itls = np.concatenate([np.diff(t) for t in several]) * 1000
    for key, values in (
        ("ttft_ms", ttfts),
        ("tpot_ms", tpots),
        ("itl_ms", itls),
        ("e2el_ms", ends),
    ):
        expected = [values.mean(), *np.percentile(values, [50, 90, 99])]
        assert list(figures[key].values()) == pytest.approx(expected)


def test_models_have_figures_of_their_own_and_the_slowest_is_named() -> None:
    answers = many_answers(300, seed=2)

    figures = summarised(*answers, Answer(model="d", error="404"))

    models = figures["per_model"]
    assert list(models) == ["a", "b", "c", "d"]
    means = {}
    for name in "abc":
        own = [a for a in answers if a.model == name]
        means[name] = float(np.mean([a.token_times_s[0] for a in own])) * 1000
        assert models[name]["requests"] == len(own)
        assert models[name]["ttft_ms"]["mean"] == pytest.approx(means[name])
        assert models[name]["output_tokens"] == sum(len(a.token_times_s) for a in own)
    assert figures["worst_model"]["ttft_ms"] == max(means, key=means.__getitem__)
    assert models["d"] == {
        "requests": 1,
        "failed": 1,
        "output_tokens": 0,
        "ttft_ms": spread([]),
        "tpot_ms": spread([]),
    }


def test_runs_are_summed_and_kept_one_by_one() -> None:
    runs = [many_answers(40, seed=3), many_answers(60, seed=4)]

    figures = summarise_runs(
        [
            LoadResult(answers=tuple(answers), duration_s=seconds)
            for answers, seconds in zip(runs, (2.0, 3.0), strict=True)
        ]
    )

    tokens = [sum(len(a.token_times_s) for a in answers) for answers in runs]
    assert figures["output_tokens_per_s"] == pytest.approx(sum(tokens) / 5)
    assert [run["output_tokens_per_s"] for run in figures["runs"]] == pytest.approx(
        [tokens[0] / 2, tokens[1] / 3]
    )
    both = [a.token_times_s[0] * 1000 for answers in runs for a in answers]
    assert figures["ttft_ms"]["p90"] == pytest.approx(np.percentile(both, 90))
    assert (figures["completed"], figures["duration_s"]) == (100, 5.0)


def test_goodput_counts_what_meets_every_objective() -> None:
    fast, slow_first, slow_next = answer(0.1, 0.15), answer(0.6, 0.65), answer(0.1, 0.4)
    one_token, failed = answer(0.2), Answer(model="a", error="x")
    objectives = [Objective(metric="ttft", limit_ms=500), Objective(metric="tpot", limit_ms=50)]

    figures = summarised(fast, slow_first, slow_next, one_token, failed, objectives=objectives)

    assert figures["goodput"] == {
        "objectives_ms": {"ttft": 500, "tpot": 50},
        "good": 2,
        "share": 0.4,
        "requests_per_s": 1.0,
    }
    by_end = summarised(fast, slow_next, objectives=[Objective(metric="e2el", limit_ms=399)])
    assert by_end["goodput"]["good"] == 1
    assert summarised(fast)["goodput"] is None
