"""Traces of requests: read, written, planned, and what is wrong in them."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest

from lora_server.cli.bench.trace import TraceFill, plan_trace, read_trace, write_trace
from lora_server.cli.bench.workload import Popularity, Workload, plan_requests
from lora_server.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path

FILL = TraceFill(base="base", input_len=5, output_len=7, vocab_size=1000, seed=3)


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def test_a_trace_names_who_is_asked_when_and_how_much(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"at": 12.5, "adapter": "b", "prompt_tokens": 3, "output_tokens": 2},
        "",
        {"at": 10, "adapter": "a"},
        {"at": 11, "adapter": None, "output_tokens": 4},
        {"at": 11.5, "adapter": ""},
    )

    requests = plan_trace(read_trace(path), FILL)

    assert [(r.model, r.arrival_s, len(r.prompt), r.output_len) for r in requests] == [
        ("a", 0.0, 5, 7),
        ("base", 1.0, 5, 4),
        ("base", 1.5, 5, 7),
        ("b", 2.5, 3, 2),
    ]
    assert all(256 <= token < 1000 for request in requests for token in request.prompt)


def test_planned_requests_come_back_from_their_own_trace(tmp_path: Path) -> None:
    planned = plan_requests(
        Workload(
            models=("base", "a", "b"),
            num_prompts=30,
            input_len=6,
            output_len=4,
            popularity=Popularity.ZIPF,
            request_rate=50.0,
            vocab_size=1000,
            seed=1,
        )
    )
    path = tmp_path / "trace.jsonl"

    write_trace(path, planned, base="base")
    again = plan_trace(read_trace(path), FILL)

    assert [(r.model, len(r.prompt), r.output_len) for r in again] == [
        (r.model, len(r.prompt), r.output_len) for r in planned
    ]
    offsets = [one.arrival_s - other.arrival_s for one, other in zip(planned, again, strict=True)]
    assert offsets == pytest.approx([planned[0].arrival_s] * 30)
    assert {json.loads(line)["adapter"] for line in path.read_text().splitlines()} == {
        None,
        "a",
        "b",
    }


def test_prompts_of_a_trace_follow_from_the_seed(tmp_path: Path) -> None:
    lines = read_trace(written(tmp_path, {"at": 0}, {"at": 1}))

    assert plan_trace(lines, FILL) == plan_trace(lines, FILL)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "Expecting"),
        ([1], "expected an object"),
        ({}, "at is None"),
        ({"at": "1"}, "at is '1', expected seconds"),
        ({"at": True}, "at is True"),
        ('{"at": Infinity}', "at is inf"),
        ({"at": 0, "adapter": 3}, "adapter is 3"),
        ({"at": 0, "prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"at": 0, "output_tokens": 2.5}, "output_tokens is 2.5"),
        ({"at": 0, "output_token": 2}, "there is no field output_token"),
    ],
)
def test_a_line_that_is_not_understood_is_told_by_its_number(
    tmp_path: Path, line: object, words: str
) -> None:
    path = written(tmp_path, {"at": 0}, line, {"at": math.pi}, line)

    with pytest.raises(StartupError) as caught:
        read_trace(path)

    assert [problem.split(":")[1] for problem in caught.value.problems] == ["2", "4"]
    assert all(words in problem for problem in caught.value.problems)


def test_a_trace_that_is_absent_or_empty_is_told(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        read_trace(tmp_path / "absent")
    with pytest.raises(StartupError, match="has no request"):
        read_trace(written(tmp_path, ""))
