"""The benchmark: its rows, its files, its byte counts, and baselines that compute the same."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.testing import assert_close

from lora_kernels import Backend
from lora_kernels.bench import __main__ as command
from lora_kernels.bench import cases as cases_module
from lora_kernels.bench.baselines import dense_product, gathered_products, loop_over_adapters
from lora_kernels.bench.cases import Case, Module, all_cases, quick_cases
from lora_kernels.bench.harness import time_in_turn
from lora_kernels.bench.machine import machine_line
from lora_kernels.bench.measure import Options, measure_case
from lora_kernels.bench.steps import LinearStep, build_step
from lora_kernels.bench.traffic import Load, bytes_of, macs_of, slot_bytes
from lora_kernels.testing import Popularity, tolerance

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lora_kernels.bench.harness import Row

CPU = torch.device("cpu")
TINY = (
    Module(name="qkv", in_features=16, out_features=(16, 8, 8)),
    Module(name="o", in_features=16, out_features=(16,)),
)
TINY_EMBEDDING = Module(name="embedding", in_features=32, out_features=(16,))
TINY_EXPERTS = Module(name="w13", in_features=16, out_features=(8, 8), num_experts=4, num_choices=2)
OPTIONS = Options(backends=(Backend.ATEN, Backend.REFERENCE), device=CPU, seconds=0.0)


@pytest.fixture(autouse=True)
def _tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cases_module.LAYERS, "tiny", TINY)
    monkeypatch.setitem(cases_module.EMBEDDINGS, "tiny", TINY_EMBEDDING)
    monkeypatch.setitem(cases_module.EXPERTS, "tiny", TINY_EXPERTS)


def tiny(op: str, **changes: Any) -> Case:
    case = Case(op=op, model="tiny", popularity=Popularity.DISTINCT, tokens=6, slots=3, rank=4)
    return replace(case, **changes)


def by_implementation(rows: list[Row]) -> dict[str, Row]:
    return {row.implementation: row for row in rows}


@pytest.mark.parametrize("op", ["shrink", "expand_", "apply_lora_", "embedding_lora_"])
def test_an_operator_has_a_row_for_each_backend_and_baseline(op: str) -> None:
    rows = by_implementation(measure_case(tiny(op), OPTIONS, 10.0))

    assert set(rows) == {
        "read slots once",
        "aten",
        "reference",
        "loop over adapters",
        "gathered bmm",
        "dense of equal flops",
    }
    assert all(0 < row.p20_us <= row.p50_us <= row.p80_us for row in rows.values())
    assert rows["aten"].slots_in_use == 3
    assert rows["read slots once"].times_read == 1.0
    assert rows["dense of equal flops"].bytes == 0


def test_an_expert_stage_is_compared_with_reading_its_slots_and_with_a_dense_product() -> None:
    rows = by_implementation(measure_case(tiny("moe_lora_"), OPTIONS, 10.0))

    assert set(rows) == {"read slots once", "aten", "reference", "dense of equal flops"}
    assert rows["aten"].bytes > rows["read slots once"].bytes > 0


@pytest.mark.parametrize("is_prefill", [False, True])
def test_a_layer_is_compared_with_its_own_products_too(is_prefill: bool) -> None:
    rows = by_implementation(measure_case(tiny("layer", is_prefill=is_prefill), OPTIONS, 10.0))

    assert {"base products", "base, then aten", "aten", "gathered bmm"} <= set(rows)
    assert "base, then reference" not in rows
    assert rows["base products"].times_base == 1.0
    assert rows["aten"].module == "qkv+o"
    assert rows["aten"].mode == ("prefill" if is_prefill else "decode")


def test_speed_is_bytes_through_the_median_and_compared_with_the_bandwidth() -> None:
    row = by_implementation(measure_case(tiny("apply_lora_"), OPTIONS, 10.0))["aten"]

    assert row.gb_per_s == pytest.approx(row.bytes / row.p50_us / 1e3)
    assert row.of_bandwidth == pytest.approx(row.gb_per_s / 10.0)


@pytest.mark.parametrize("baseline", [loop_over_adapters, gathered_products])
@pytest.mark.parametrize("op", ["expand_", "apply_lora_", "embedding_lora_"])
@pytest.mark.parametrize("popularity", Popularity)
def test_a_baseline_computes_the_same_as_the_operator(
    baseline: Callable[[LinearStep, int], None], op: str, popularity: Popularity
) -> None:
    case = tiny(op, popularity=popularity)
    one, other = (
        build_step(case, case.modules[0], dtype=torch.float32, device=CPU) for _ in range(2)
    )
    assert isinstance(one, LinearStep)
    assert isinstance(other, LinearStep)
    one.run(1, Backend.REFERENCE)

    baseline(other, 1)

    within = tolerance(torch.float32, reduction=16)
    assert_close(other.y, one.y, atol=within.atol, rtol=within.rtol)


def test_every_copy_of_the_slots_holds_the_same_adapters() -> None:
    case = tiny("apply_lora_")
    step = build_step(case, case.modules[0], dtype=torch.bfloat16, device=CPU)

    assert isinstance(step, LinearStep)
    first, *others = step.weights
    assert len(others) == 29
    assert all(torch.equal(other.a_storage, first.a_storage) for other in others)
    assert all(torch.equal(other.b_storage, first.b_storage) for other in others)
    assert all(other.slot_ranks == first.slot_ranks == [(4, 4, 4)] * 3 for other in others)


def test_bytes_and_multiply_adds_are_those_counted_by_hand() -> None:
    module = Module(name="qkv", in_features=10, out_features=(6, 2))
    load = Load(entries=5, rows=5, groups=3, rank=4, element_size=2)

    # A: 3 slots x 4 ranks x 2 slices x 10 = 240 elements, B: 3 x 4 x 8 = 96, x: 50, y: 40,
    # v: 5 x 4 x 2 = 40 of 4 bytes.
    assert bytes_of("shrink", module, load) == 2 * 240 + 2 * 50 + 4 * 40
    assert bytes_of("expand_", module, load) == 2 * 96 + 4 * 40 + 2 * 2 * 40
    assert bytes_of("apply_lora_", module, load) == 2 * (240 + 50 + 96 + 2 * 40)
    assert slot_bytes("apply_lora_", module, load) == 2 * (240 + 96)
    assert slot_bytes("shrink", module, load) == 2 * 240
    assert slot_bytes("expand_", module, load) == 2 * 96
    assert macs_of("shrink", module, load) == 5 * 4 * 2 * 10
    assert macs_of("expand_", module, load) == 5 * 4 * 8
    assert macs_of("apply_lora_", module, load) == 5 * 4 * (20 + 8)


def test_bytes_of_embeddings_and_experts_are_those_counted_by_hand() -> None:
    embedding = Module(name="embedding", in_features=100, out_features=(6,))
    experts = Module(name="w13", in_features=10, out_features=(6, 2), num_experts=4, num_choices=2)
    load = Load(entries=6, rows=3, groups=5, rank=4, element_size=2)

    # 6 look-ups of 4 elements, B: 5 x 4 x 6, y: 6 x 6 twice.
    assert bytes_of("embedding_lora_", embedding, load) == 2 * (24 + 120 + 72)
    # A: 5 pairs x 4 x 2 x 10, B: 5 x 4 x 8, x: 3 tokens x 10, y: 6 x 8 twice.
    assert bytes_of("moe_lora_", experts, load) == 2 * (400 + 160 + 30 + 96)


def test_a_dense_product_does_as_many_multiply_adds() -> None:
    case = tiny("apply_lora_")
    step = build_step(case, case.modules[0], dtype=torch.float32, device=CPU)

    product = dense_product(step, dtype=torch.float32, device=CPU)()

    # 6 tokens x 4 ranks x (3 slices x 16 in + 32 out) = 1920 = 6 rows x 16 x 20 columns.
    assert product.shape == (6, 20)


def test_candidates_take_turns_with_growing_numbers_until_each_had_its_share() -> None:
    calls: list[tuple[str, int]] = []
    durations = {"slow": 1.0, "quick": 0.125}

    def timer(run: Callable[[int], object], number: int) -> float:
        run(number)
        return durations[calls[-1][0]]

    def call(number: int, name: str) -> None:
        calls.append((name, number))

    timed = time_in_turn(
        {name: partial(call, name=name) for name in durations},
        timer,
        seconds=2.0,
        warm_up=1,
    )

    assert [number for _, number in calls] == list(range(len(calls)))
    assert [name for name, _ in calls[:4]] == ["slow", "quick", "slow", "quick"]
    assert {name: times.runs for name, times in timed.items()} == {"slow": 3, "quick": 8}
    assert (timed["slow"].p50, timed["quick"].p80) == (1e6, 0.125e6)


def test_the_machine_line_names_processor_cores_torch_and_device() -> None:
    line = machine_line(CPU)

    names = [field.partition("=")[0] for field in line.split("; ")]
    assert names == ["cpu", "cores", "threads", "python", "torch", "triton", "device", "utc"]
    assert f"torch={torch.__version__}" in line
    assert "\n" not in line


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as stream:
        assert next(stream).startswith("# cpu=")
        return list(csv.DictReader(stream))


def test_the_command_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "quick_cases", lambda _: [tiny("shrink"), tiny("layer")])
    path = tmp_path / "rows.csv"

    command.main(["--quick", "--seconds", "0", "--backend", "aten", "--output", str(path)])

    rows, printed = read_csv(path), capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + len(rows)
    assert [row["op"] for row in rows[:2]] == ["bandwidth", "bandwidth"]
    assert {row["op"] for row in rows[2:]} == {"shrink", "layer"}
    assert {row["implementation"] for row in rows} >= {"aten", "base, then aten", "read"}
    assert all(float(row["p50_us"]) > 0 and int(row["runs"]) >= 3 for row in rows)


def test_an_interrupted_run_leaves_the_rows_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(case: Case, options: Options, bandwidth: float) -> list[Row]:
        if case.op == "expand_":
            raise KeyboardInterrupt
        return measure_case(case, options, bandwidth)

    monkeypatch.setattr(command, "measure_case", interrupt)
    path = tmp_path / "rows.csv"

    with pytest.raises(KeyboardInterrupt):
        command.run([tiny("shrink"), tiny("expand_")], OPTIONS, output=path, plot=None)

    assert {row["op"] for row in read_csv(path)} == {"bandwidth", "shrink"}


def test_quick_covers_each_operator_model_and_popularity_and_comes_first_of_all() -> None:
    quick = quick_cases("cpu")

    assert {case.op for case in quick} == {
        "layer",
        "shrink",
        "expand_",
        "apply_lora_",
        "embedding_lora_",
        "moe_lora_",
    }
    models = {"smollm2-135m", "qwen3-0.6b", "llama-7b", "llama-70b", "mixtral-8x7b"}
    assert {case.model for case in quick} - {"tiny"} == models
    applied = {(case.model, case.popularity) for case in quick if case.op == "apply_lora_"}
    assert len(applied - {("tiny", popularity) for popularity in Popularity}) == 4 * 4
    assert all_cases("cpu")[: len(quick)] == quick
    assert any(case.slots == 64 for case in quick_cases("cuda"))


def test_a_choice_without_cases_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--quick", "--model", "gpt-5"])

    assert "no case has op [] and model ['gpt-5']" in capsys.readouterr().err
