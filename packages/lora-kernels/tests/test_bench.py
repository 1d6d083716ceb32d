"""The benchmark runs, and its baseline computes the same."""

from __future__ import annotations

import pytest
import torch

from lora_kernels import Backend, apply_lora_
from lora_kernels.bench import __main__ as bench
from lora_kernels.bench.harness import time_in_turn
from lora_kernels.testing import Popularity


@pytest.fixture
def case() -> bench.Case:
    return bench.Case(mode="decode", tokens=3, slots=2, rank=4, popularity=Popularity.DISTINCT)


def test_a_case_yields_a_row_for_the_operator_and_each_baseline(case: bench.Case) -> None:
    rows = bench.time_case(case, num_layers=1, rounds=2, dtype=torch.bfloat16)

    assert {row.op for row in rows} == {
        "apply_lora_ aten",
        "read slots once",
        "base linear",
        "gathered bmm",
    }
    assert all(0 < row.p20 <= row.p50 <= row.p80 for row in rows)
    assert all("decode" in row.line() for row in rows)


def test_the_gathered_baseline_computes_the_same_as_the_operator(case: bench.Case) -> None:
    (layer,) = bench.build_layers(case, 1, torch.float32)
    routing = bench.route(case)
    expected = [y.clone() for y in layer.y]
    for y, x, stack in zip(expected, layer.x, layer.weights, strict=True):
        apply_lora_(y, x, stack, routing, backend=Backend.REFERENCE)

    bench.apply_gathered(layer, routing)

    for y, want in zip(layer.y, expected, strict=True):
        torch.testing.assert_close(y, want)


def test_candidates_take_turns_and_warm_up_does_not_count() -> None:
    calls: list[tuple[str, int]] = []

    timed = time_in_turn(
        {"a": lambda i: calls.append(("a", i)), "b": lambda i: calls.append(("b", i))},
        rounds=2,
        warm_up=1,
    )

    assert calls == [("a", -1), ("b", -1), ("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert set(timed) == {"a", "b"}


def test_the_command_prints_each_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: bench.Case
) -> None:
    monkeypatch.setattr(bench, "DECODE", [case])
    monkeypatch.setattr(bench, "PREFILL", [])

    bench.main(["--quick", "--rounds", "2", "--layers", "1", "--threads", "1"])

    lines = capsys.readouterr().out.splitlines()
    assert "p50 us" in lines[1]
    assert len(lines) == 2 + 4
