"""The benchmark: what it measures is what it says, and the memory bound holds."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from lora_weights import load_adapter
from lora_weights.bench import __main__ as program
from lora_weights.bench.cases import (
    SMOLLM2,
    inspect_headers,
    load_packed,
    read_plain,
    weights_of,
    write_case,
    write_many,
)
from lora_weights.bench.measure import build_row, measure_ms

if TYPE_CHECKING:
    from pathlib import Path


def test_the_adapter_of_the_goal_has_20_megabytes_in_210_modules(tmp_path: Path) -> None:
    folder = write_case(tmp_path, rank=program.GOAL_RANK)

    adapter = load_adapter(folder)

    assert len(adapter.parts) == len(SMOLLM2) == 210
    assert 19e6 < adapter.nbytes < 21e6
    assert len(read_plain(folder)) == weights_of(folder).stat().st_size


def test_what_is_timed_is_packed_as_the_model_fuses_it(tmp_path: Path) -> None:
    packed = load_packed(write_case(tmp_path, rank=1))

    assert len(packed) == 30 * 4
    assert len(packed["model.layers.0.self_attn.qkv_proj"].parts) == 3
    assert len(packed["model.layers.29.mlp.gate_up_proj"].parts) == 2


def test_a_load_takes_at_most_a_fifth_more_memory_than_its_file(tmp_path: Path) -> None:
    folder = write_case(tmp_path, rank=program.GOAL_RANK)

    result = subprocess.run(
        [sys.executable, "-m", "lora_weights.bench", "--peak-of", folder],
        capture_output=True,
        text=True,
        check=True,
    )

    ratio = int(result.stdout) / weights_of(folder).stat().st_size
    # Below one half the measurement would have missed the tensors themselves.
    assert 0.5 < ratio <= program.MEMORY_GOAL


def test_headers_of_many_adapters_are_all_inspected(tmp_path: Path) -> None:
    folders = write_many(tmp_path, 3)

    assert inspect_headers(folders) == 3


def test_a_row_has_its_percentiles_and_its_machine() -> None:
    row = build_row("case", "ms", [5.0, 1.0, 4.0, 2.0, 3.0, 6.0], config="sizes", goal=10.0)

    assert (row.p20, row.p50, row.p80, row.repeats) == (2.0, 3.0, 5.0, 6)
    assert row.cpu_p20 is None
    assert row.cpu
    assert row.torch
    assert row.num_cores >= 1


def test_a_run_that_warms_up_is_not_counted() -> None:
    runs: list[int] = []

    times, cpu = measure_ms(lambda: runs.append(0), repeats=4)

    assert (len(times), len(cpu), len(runs)) == (4, 4, 5)


@pytest.mark.parametrize("ending", ["csv", "json"])
def test_rows_are_written_as_the_name_says(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows.{ending}"
    row = build_row("case", "ms", [1.0], config="sizes")

    program._write([row, row], path)

    with path.open(newline="") as stream:
        rows = json.load(stream) if ending == "json" else list(csv.DictReader(stream))
    assert [found["case"] for found in rows] == ["case", "case"]
    assert float(rows[0]["p20"]) == 1.0
    assert rows[0]["cpu"] == row.cpu
