"""Traces are read in the order of their times, and popularity is drawn the same every time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from lora_server.cli.bench.trace import write_trace
from lora_server.cli.bench.workload import PlannedRequest
from lora_server.cli.plan.traffic import NUM_DRAWN, draw_zipf, read_trace
from lora_server.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines))
    return str(path)


def test_a_trace_is_in_the_order_of_its_times(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        '{"adapter": "late", "at": 2.5}',
        "",
        '{"adapter": "early", "at": 0}',
        '{"adapter": "middle", "at": 1, "prompt_tokens": 7}',
    )

    assert read_trace(path, base_names=["base"]) == ["early", "middle", "late"]


def test_the_trace_of_a_load_test_is_one(tmp_path: Path) -> None:
    requests = [
        PlannedRequest(model=model, prompt=(1, 2), output_len=3, arrival_s=arrival)
        for model, arrival in (("base", 0.0), ("b", 2.0), ("a", 1.0))
    ]
    write_trace(tmp_path / "t.jsonl", requests, base="base")

    assert read_trace(str(tmp_path / "t.jsonl"), base_names=[]) == ["a", "b"]


def test_without_times_the_lines_are_in_order(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", '{"adapter": "b"}', '{"adapter": "a"}', '{"adapter": "b"}')

    assert read_trace(path, base_names=[]) == ["b", "a", "b"]


def test_requests_of_the_base_use_no_adapter(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        '{"adapter": null}',
        '{"adapter": ""}',
        '{"adapter": "base"}',
        '{"at": 3}',
        '{"adapter": "a"}',
    )

    assert read_trace(path, base_names=["base"]) == ["a"]


def test_every_line_that_means_nothing_is_named(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        "no json",
        "[]",
        "{}",
        '{"adapter": 3}',
        '{"adapter": "a", "at": "x"}',
        '{"adapter": "a", "at": true}',
        '{"adapter": "a", "at": 1e999}',
    )

    with pytest.raises(StartupError) as raised:
        read_trace(path, base_names=[])

    assert len(raised.value.problems) == 7
    assert [f"line {n}" in p for n, p in enumerate(raised.value.problems, 1)] == [True] * 7


def test_many_bad_lines_are_counted_not_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *["?"] * 30)

    with pytest.raises(StartupError) as raised:
        read_trace(path, base_names=[])

    assert len(raised.value.problems) == 9
    assert "22 more" in raised.value.problems[-1]


@pytest.mark.parametrize("content", [None, "", '{"adapter": null}', b"\xff\xfe"])
def test_a_trace_without_adapters_or_without_a_file_is_refused(
    tmp_path: Path, content: str | bytes | None
) -> None:
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    with pytest.raises(StartupError, match=r"t\.jsonl"):
        read_trace(str(path), base_names=[])


def test_shares_follow_the_exponent() -> None:
    counts = Counter(draw_zipf(["a", "b", "c"], 1.0))

    # 1 : 1/2 : 1/3, each within five standard deviations of a share of the draws
    for name, share in (("a", 6 / 11), ("b", 3 / 11), ("c", 2 / 11)):
        assert abs(counts[name] / NUM_DRAWN - share) < 0.018
    assert draw_zipf(["a", "b", "c"], 1.0) == draw_zipf(["a", "b", "c"], 1.0)


def test_exponent_zero_is_uniform() -> None:
    counts = Counter(draw_zipf(["a", "b"], 0.0))

    assert abs(counts["a"] / NUM_DRAWN - 0.5) < 0.018
