"""Two load tests side by side: ratios, and which differences are more than noise."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

from lora_server.cli.bench.compare import Noise, compare_files, judge
from lora_server.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path


def run_of(rate: float, p99: float) -> dict[str, Any]:
    return {"output_tokens_per_s": rate, "ttft_ms": {"mean": 1.0, "p99": p99}, "goodput": None}


def file_of(*runs: dict[str, Any], **config: Any) -> dict[str, Any]:
    mean = sum(run["output_tokens_per_s"] for run in runs) / len(runs)
    total = run_of(mean, max(run["ttft_ms"]["p99"] for run in runs))
    return {**total, "runs": list(runs), "config": config, "machine": {"cpu": "x"}}


def by_figure(before: Any, after: Any) -> dict[str, Any]:
    return {one.figure: one for one in compare_files(before, after).differences}


def test_figures_have_a_ratio_and_the_spread_of_their_runs() -> None:
    before = file_of(run_of(100, 9), run_of(110, 8))
    after = file_of(run_of(150, 9.5), run_of(160, 7))

    found = by_figure(before, after)

    rate = found["output_tokens_per_s"]
    assert (rate.before, rate.after, rate.ratio) == (105, 155, pytest.approx(155 / 105))
    assert (rate.spread_before, rate.spread_after) == ((100, 110), (150, 160))
    assert rate.noise is Noise.BEYOND
    assert found["ttft_ms.p99"].noise is Noise.WITHIN
    assert list(found) == ["output_tokens_per_s", "ttft_ms.mean", "ttft_ms.p99"]


def test_one_run_has_no_spread() -> None:
    old = run_of(100, 9) | {"config": {}, "machine": {}}

    comparison = compare_files(old, file_of(run_of(200, 1), run_of(210, 1)))

    assert {one.noise for one in comparison.differences} == {Noise.UNKNOWN}
    assert (comparison.num_runs, comparison.chance) == ((1, 2), None)


@pytest.mark.parametrize(("m", "n"), [(2, 2), (2, 3), (3, 3), (4, 3)])
def test_the_chance_is_that_of_all_orders_of_equal_runs(m: int, n: int) -> None:
    orders = list(itertools.combinations(range(m + n), m))
    apart = 0
    for chosen in orders:
        rest = [i for i in range(m + n) if i not in chosen]
        apart += judge([float(i) for i in chosen], [float(i) for i in rest]) is Noise.BEYOND

    comparison = compare_files(file_of(*[run_of(1, 1)] * m), file_of(*[run_of(1, 1)] * n))

    assert comparison.chance == pytest.approx(apart / len(orders))


def test_what_else_differs_is_told() -> None:
    before = file_of(run_of(1, 1), seed=1, num_prompts=5)
    after = file_of(run_of(1, 1), seed=1, num_prompts=6)
    after["goodput"] = {"requests_per_s": 3}

    comparison = compare_files(before, after)

    assert comparison.configs == {"num_prompts": (5, 6)}
    assert comparison.only_after == ("goodput.requests_per_s",)
    assert comparison.only_before == ()


def test_the_command_prints_a_table_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    paths[0].write_text(json.dumps(file_of(run_of(100, 9), run_of(110, 8), seed=1)))
    paths[1].write_text(json.dumps(file_of(run_of(150, 9), run_of(160, 7), seed=2)))

    status = main(["bench", "compare", *map(str, paths)])
    text = capsys.readouterr().out
    main(["bench", "compare", "--json", *map(str, paths)])
    result = json.loads(capsys.readouterr().out)

    assert status == 0
    for part in ("output_tokens_per_s", "1.476", "beyond", "33.3%", "differs: seed: 1 -> 2"):
        assert part in text
    assert result["differences"][0]["ratio"] == pytest.approx(155 / 105)
    assert result["config"] == {"seed": [1, 2]}


def test_files_that_cannot_be_compared_are_all_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("x")
    (tmp_path / "other").write_text("{}")

    first = main(["bench", "compare", str(tmp_path / "text"), str(tmp_path / "absent")])
    second = main(["bench", "compare", str(tmp_path / "other"), str(tmp_path / "other")])

    error = capsys.readouterr().err
    assert (first, second) == (1, 1)
    for words in ("is not JSON", "No such file", "holds no figures"):
        assert words in error
