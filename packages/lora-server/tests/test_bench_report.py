"""What people are shown of a load test's figures."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lora_server.cli.bench.client import Answer
from lora_server.cli.bench.figures import summarise_runs
from lora_server.cli.bench.goodput import Objective
from lora_server.cli.bench.load import LoadResult
from lora_server.cli.bench.report import (
    describe_machine,
    error_lines,
    figures_table,
    note_lines,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


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


def test_short_answers_and_a_missing_count_are_said() -> None:
    figures = summarised(answer(0.1, 0.2, counted=False))

    lines = [str(line) for line in error_lines(figures)]
    assert figures["short_answers"] == 1
    assert figures["tokens_counted_by"] == "events"
    assert any("shorter" in line for line in lines)
    assert any("no usage" in line for line in lines)


def test_the_slowest_model_and_the_share_of_good_answers_are_said() -> None:
    figures = summarised(
        answer(0.1, 0.2),
        answer(0.4, 0.45, model="b"),
        objectives=[Objective(metric="ttft", limit_ms=200)],
    )

    lines = list(note_lines(figures))
    assert lines == [
        "slowest in time to first token: b, 400.0 ms in the mean",
        "slowest in time per output token: a, 100.0 ms in the mean",
        "within ttft 200 ms: 1 requests, 50.0%",
    ]
    assert list(note_lines(summarised(answer(0.1, 0.2)))) == []


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
