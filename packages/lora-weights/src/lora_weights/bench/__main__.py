"""Measure reading: ``python -m lora_weights.bench [--quick] [--output FILE.csv|FILE.json]``.

On one thread, from a warm file cache. On a machine with other work, p20 is the figure to read, and
the processor time beside it.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from lora_weights.bench.cases import (
    SMOLLM2,
    inspect_headers,
    load_packed,
    read_plain,
    weights_of,
    write_case,
    write_many,
)
from lora_weights.bench.measure import Row, build_row, measure_ms, peak_extra_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

RANKS = (16, 32)
LOAD_GOAL_MS = 60.0
MEMORY_GOAL = 1.2
HEADERS_GOAL_S = 10.0
GOAL_RANK = 32
"""The goals are for 20 MB."""


def measure_load(root: Path, rank: int, repeats: int) -> Iterator[Row]:
    """Yield the time to packed form, its floors, and the memory it takes."""
    folder = write_case(root / f"rank{rank}", rank=rank)
    size = weights_of(folder).stat().st_size
    config = f"{len(SMOLLM2)} modules, bf16, rank {rank}, {size / 1e6:.1f} MB"
    has_goal = rank == GOAL_RANK
    content = read_plain(folder)
    runs = {
        "load, bind, pack": lambda: load_packed(folder),
        "floor: plain read": lambda: read_plain(folder),
        "floor: copy in memory": lambda: bytearray(content),
    }
    for case, run in runs.items():
        times, cpu = measure_ms(run, repeats=repeats)
        goal = LOAD_GOAL_MS if has_goal and run is runs["load, bind, pack"] else None
        yield build_row(case, "ms", times, cpu=cpu, config=config, goal=goal)
    ratios = [_child_peak(folder) / size for _ in range(max(3, repeats // 10))]
    goal = MEMORY_GOAL if has_goal else None
    yield build_row("peak extra memory / file", "ratio", ratios, config=config, goal=goal)


def measure_headers(root: Path, count: int, repeats: int) -> Row:
    """Return the time to inspect many adapters by their headers."""
    folders = write_many(root / "many", count)
    times, cpu = [], []
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        good = inspect_headers(folders)
        times.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
        assert good == count, f"{count - good} adapters had problems"
    config = f"{count} adapters, {len(SMOLLM2)} modules each"
    return build_row("inspect headers", "s", times, cpu=cpu, config=config, goal=HEADERS_GOAL_S)


def _child_peak(folder: Path) -> int:
    """Measure the memory of one load in a process of its own."""
    command = [sys.executable, "-m", "lora_weights.bench", "--peak-of", str(folder)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)  # noqa: S603


def _print_peak(folder: Path) -> None:
    # The first load brings the code and torch's own memory; it is not the adapter's.
    with TemporaryDirectory() as root:
        load_packed(write_case(Path(root), rank=1))
    print(peak_extra_bytes(lambda: load_packed(folder)))


def _show(row: Row) -> None:
    goal = "" if row.goal is None else f"  goal {row.goal:g}"
    values = "  ".join(f"{value:9.3f}" for value in (row.p20, row.p50, row.p80))
    values += " " * 11 if row.cpu_p20 is None else f"  {row.cpu_p20:9.3f}"
    print(f"{row.case:26s} {row.unit:6s} {values}  {row.config}{goal}", flush=True)


def _write(rows: list[Row], path: Path) -> None:
    """Write the rows; the ending of the name says how."""
    if path.suffix == ".json":
        path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
        return
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def main() -> None:
    """Run all cases; print a line each, and write them when asked to."""
    parser = argparse.ArgumentParser(prog="python -m lora_weights.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats, 50 adapters")
    parser.add_argument("--output", type=Path, help="file for the rows, .csv or .json")
    parser.add_argument("--peak-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.output is not None and arguments.output.suffix not in (".csv", ".json"):
        parser.error(f"--output is {arguments.output}, expected a name ending in .csv or .json")
    torch.set_num_threads(1)
    if arguments.peak_of is not None:
        _print_peak(arguments.peak_of)
        return
    repeats = 5 if arguments.quick else 50
    rows = []
    with TemporaryDirectory() as root:
        print(f"{'':26s} {'':6s} {'p20':>9s}  {'p50':>9s}  {'p80':>9s}  {'cpu p20':>9s}")
        for rank in RANKS:
            for row in measure_load(Path(root), rank, repeats):
                _show(row)
                rows.append(row)
        count = 50 if arguments.quick else 1000
        rows.append(measure_headers(Path(root), count, repeats=1 if arguments.quick else 3))
        _show(rows[-1])
    last = rows[-1]
    machine = f"{last.cpu}, {last.num_cores} cores, load {last.load:.1f}"
    print(f"{machine}; torch {last.torch}, Python {last.python}, one thread, {last.time}")
    if arguments.output is not None:
        _write(rows, arguments.output)


if __name__ == "__main__":
    main()
