"""The figures of a load test, from answers with known times."""

from __future__ import annotations

import io
import json
import statistics
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lora_server.cli.bench.client import Answer
from lora_server.cli.bench.load import LoadResult
from lora_server.cli.bench.report import (
    describe_machine,
    error_lines,
    figures_table,
    percentile,
    spread,
    summarise,
)

if TYPE_CHECKING:
    from pathlib import Path


def answer(*times: float, tokens: int | None = None, counted: bool = True) -> Answer:
    return Answer(
        model="a",
        token_times_s=times,
        duration_s=times[-1],
        output_tokens=len(times) if tokens is None else tokens,
        is_counted_by_server=counted,
    )


def summarised(*answers: Answer, output_len: int = 3) -> dict[str, Any]:
    result = LoadResult(answers=answers, duration_s=2.0)
    return summarise(result, input_len=10, output_len=output_len)


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
    figures = summarised(answer(0.1, 0.5, tokens=5), output_len=5)

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


def test_short_answers_and_a_missing_count_are_said() -> None:
    figures = summarised(answer(0.1, 0.2, counted=False))

    lines = [str(line) for line in error_lines(figures)]
    assert figures["short_answers"] == 1
    assert figures["tokens_counted_by"] == "events"
    assert any("shorter" in line for line in lines)
    assert any("no usage" in line for line in lines)


@given(st.lists(st.floats(0, 1000), min_size=2, max_size=50))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")

    for percent in (50, 90, 99):
        expected = cuts[percent - 1]
        assert percentile(sorted(values), percent) == pytest.approx(expected, abs=1e-9)


def test_a_single_value_is_all_its_percentiles() -> None:
    assert spread([0.25]) == {"mean": 250, "p50": 250, "p90": 250, "p99": 250}


def test_the_machine_is_described_with_the_name_of_its_processor(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: Fast CPU @ 3 GHz\n")

    machine = describe_machine(info)

    assert machine["cpu"] == "Fast CPU @ 3 GHz"
    assert int(machine["cores"]) >= 1
    assert describe_machine(tmp_path / "absent")["cpu"]


def test_the_table_fits_a_narrow_terminal() -> None:
    stream = io.StringIO()

    figures = summarised(answer(0.1, 0.2, 0.4), Answer(model="a", error="x"))
    Console(file=stream, width=80).print(figures_table(figures))

    text = stream.getvalue()
    for part in ("output tokens/s", "time to first token, ms", "p99", "100.0", "failed"):
        assert part in text
