"""How fast a small model is served on a CPU, beside the goals and what the bytes allow.

`python integration_tests/bench_cpu.py [--output FILE] [--only 1,4] [--quick]` measures SmolLM2-135M
in bfloat16, as the demo converts it, with random adapters. All figures that are compared are
measured in turn in one run. Prints a table of goals, and JSON with `--output`. A measurement, not a
test: goals that are missed are part of the result.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from support.asleep import STEP_S
from support.cpu_model import CpuModel, copy_bytes_per_s, prepare_model
from support.cpu_serving import (
    BASE,
    CONCURRENCY,
    Case,
    measure_alone,
    rates,
    run_seconds,
    start_seconds,
    started,
    take_turns,
)
from support.cpu_steps import (
    NUM_PROMPTS,
    measure_neighbours,
    measure_prefill,
    stepping,
)
from support.goals import Bound, GoalRow, goals_table, merge_rows
from support.machine import machine

from lora_server.cli.bench.workload import Popularity

if TYPE_CHECKING:
    from collections.abc import Callable

RANK, SMALL_RANK, LARGE_RANK = 16, 8, 64
NUM_SLOTS, NUM_ADAPTERS = 8, 64
NUM_STREAMS, STREAM_TOKENS, STREAM_PROMPT = 64, 256, 8
ALL = "1,2,3,4,5,6,7,8"
SERVING = {1, 2, 3, 5}
"""Goals that are measured on one server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all measurements of a run have in common."""

    model: CpuModel
    folder: Path
    chosen: frozenset[int]
    rounds: int
    num_prompts: int
    with_aten: bool
    copy_bytes_per_s: float

    def milliseconds(self, num_bytes: float) -> float:
        """Return how long these bytes take at the speed of a copy."""
        return num_bytes / self.copy_bytes_per_s * 1e3

    def adapters(self, prefix: str, count: int, rank: int) -> dict[str, Path]:
        """Write adapters, unless they are there; return folders by name."""
        found = {f"{prefix}{i}": self.folder / f"{prefix}{i}" for i in range(count)}
        for seed, folder in enumerate(found.values()):
            if not folder.exists():
                self.model.save_adapter(folder, rank=rank, seed=seed)
        os.sync()  # else the system writes them while something is measured
        return found

    def flags(self, adapters: dict[str, Path]) -> list[str]:
        """Return the command line of a server with these adapters."""
        flags = ["serve", str(self.model.folder), "--served-model-name", BASE]
        flags += ["--kv-cache-memory", "1GiB", "--effect-probe", "off"]
        if adapters:
            flags += ["--max-cpu-loras", str(len(adapters)), "--lora-modules"]
            flags += [f"{name}={folder}" for name, folder in adapters.items()]
        return flags


def measure_serving(bench: Bench) -> list[GoalRow]:
    """Goals 1, 2, 3 and 5: one server, all kinds of load in turn."""
    rows: list[GoalRow] = []
    count = NUM_ADAPTERS if 3 in bench.chosen else NUM_SLOTS
    adapters = bench.adapters("a", count, RANK)
    names = tuple(adapters)
    with started(bench.flags(adapters), bench.folder / "serving.log") as server:
        if bench.chosen & {1, 2, 3}:
            eight = Case(url=server.url, models=names[:NUM_SLOTS], num_prompts=bench.num_prompts)
            cases = {
                "eight": eight,
                "base": Case(url=server.url, models=(BASE,), num_prompts=bench.num_prompts),
            }
            if 3 in bench.chosen:
                cases["many"] = Case(
                    url=server.url,
                    models=names,
                    num_prompts=bench.num_prompts,
                    popularity=Popularity.ZIPF,
                )
            found = {name: rates(runs) for name, runs in take_turns(cases, bench.rounds).items()}
            rows += throughput_rows(bench, found)
        if 5 in bench.chosen:
            rows += alone_rows(bench, server.url, names[0])
    if bench.with_aten and 1 in bench.chosen:
        rows.append(aten_row(bench))
    return rows


def throughput_rows(bench: Bench, found: dict[str, list[float]]) -> list[GoalRow]:
    """Make the rows of goals 1 to 3 from the rates of each round."""
    eight, base = statistics.median(found["eight"]), statistics.median(found["base"])
    adapter_bytes = NUM_SLOTS * bench.model.adapter_bytes(RANK)
    num_bytes = bench.model.num_bytes + adapter_bytes
    ratio = num_bytes / bench.model.num_bytes
    ideal, ideal_base = (
        CONCURRENCY / bench.milliseconds(size) * 1e3 for size in (num_bytes, bench.model.num_bytes)
    )
    rows = [
        GoalRow(
            number="1",
            what=f"{NUM_SLOTS} adapters of rank {RANK}, {CONCURRENCY} requests at once",
            value=eight,
            unit="tokens/s",
            bound=Bound.LEAST,
            limit=300,
            floor=f"{num_bytes / 1e6:.0f} MB a step: {ideal:.0f} tokens/s",
            details={"rounds": found["eight"]},
        ),
        GoalRow(
            number="2",
            what="base only, same server",
            value=base,
            unit="tokens/s",
            bound=Bound.LEAST,
            limit=400,
            floor=f"{bench.model.num_bytes / 1e6:.0f} MB a step: {ideal_base:.0f} tokens/s",
            details={"rounds": found["base"]},
        ),
        GoalRow(
            number="2b",
            what="base's rate over the adapters'",
            value=base / eight,
            unit="",
            bound=Bound.MOST,
            limit=1.5 * ratio,
            floor=f"bytes: {ratio:.2f}",
        ),
    ]
    if "many" in found:
        many = statistics.median(found["many"])
        rows.append(
            GoalRow(
                number="3",
                what=f"{NUM_ADAPTERS} adapters, {NUM_SLOTS} slots, zipf, over 1",
                value=many / eight,
                unit="",
                bound=Bound.LEAST,
                limit=0.8,
                floor="as many requests at work as in 1: 1",
                details={"rounds": found["many"]},
            )
        )
    return rows


def alone_rows(bench: Bench, url: str, name: str) -> list[GoalRow]:
    """Goal 5, on a server that does nothing else."""
    repeats = 3 * bench.rounds
    alone = measure_alone(url, name, bench.model.folder, repeats)
    ratio = 1 + bench.model.adapter_bytes(RANK) / bench.model.num_bytes
    milliseconds = {
        "ttft_ms": {name: round(value, 2) for name, value in alone.ttft_ms.items()},
        "tpot_ms": {name: round(value, 2) for name, value in alone.tpot_ms.items()},
        "requests": repeats,
    }
    return [
        GoalRow(
            number="5a",
            what="alone: time per token with an adapter, over the base's",
            value=alone.tpot_ms["adapter"] / alone.tpot_ms[BASE],
            unit="",
            bound=Bound.MOST,
            limit=1.3,
            floor=f"bytes: {ratio:.2f}",
            details=milliseconds,
        ),
        GoalRow(
            number="5b",
            what="alone: first token of 128 with an adapter, over the bare model's forward",
            value=alone.ttft_ms["adapter"] / alone.ttft_ms["forward"],
            unit="",
            bound=Bound.MOST,
            limit=1.5,
            floor="the forward itself: 1",
            details=milliseconds,
        ),
    ]


def aten_row(bench: Bench) -> GoalRow:
    """Compare goal 1 with torch's own operators: two servers in turn."""
    adapters = bench.adapters("a", NUM_SLOTS, RANK)
    flags = bench.flags(adapters)
    with (
        started(flags, bench.folder / "native.log") as native,
        started([*flags, "--cpu-kernels", "aten"], bench.folder / "aten.log") as aten,
    ):
        cases = {
            name: Case(url=server.url, models=tuple(adapters), num_prompts=bench.num_prompts)
            for name, server in (("auto", native), ("aten", aten))
        }
        found = {name: rates(runs) for name, runs in take_turns(cases, bench.rounds).items()}
    return GoalRow(
        number="1b",
        what="as 1, over the rate with --cpu-kernels aten",
        value=statistics.median(found["auto"]) / statistics.median(found["aten"]),
        unit="",
        bound=Bound.NONE,
        floor="",
        details={"rounds": found},
    )


def prefill_rows(bench: Bench) -> list[GoalRow]:
    """Goal 4: one step of 512 prompt tokens."""
    adapters = bench.adapters("a", NUM_SLOTS, RANK)
    with stepping(bench.model.folder, adapters, max_loras=NUM_SLOTS) as stepper:
        found = measure_prefill(stepper, list(adapters), 15 * bench.rounds)
    added = bench.model.num_adapter_weights(RANK) / bench.model.num_linear_weights
    details = {
        "ms": {name: round(value, 1) for name, value in found.items()},
        "steps": 15 * bench.rounds,
    }
    rows = (
        ("4a", "1 adapter, 1 prompt", "base, 1 prompt", 1.15),
        ("4b", "8 adapters, 8 prompts", "base, 8 prompts", 1.3),
    )
    return [
        GoalRow(
            number=number,
            what=f"512 prompt tokens, {case}, over the base's",
            value=found[case] / found[base],
            unit="",
            bound=Bound.MOST,
            limit=limit,
            floor=f"multiply-adds: {1 + added:.2f}",
            details=details,
        )
        for number, case, base, limit in rows
    ]


def neighbour_rows(bench: Bench) -> list[GoalRow]:
    """Goal 6: a decode step of a rank-8 request with neighbours of rank 8, and of rank 64."""
    count = NUM_PROMPTS - 1
    own = bench.adapters("own", 1, SMALL_RANK)
    small = bench.adapters("small", count, SMALL_RANK)
    large = bench.adapters("large", count, LARGE_RANK)
    adapters = {**own, **small, **large}
    with stepping(bench.model.folder, adapters, max_loras=len(adapters)) as stepper:
        small_ms, large_ms = measure_neighbours(
            stepper,
            own=next(iter(own)),
            small=list(small),
            large=list(large),
            repeats=3 * bench.rounds,
        )
    model = bench.model
    more_bytes = count * (model.adapter_bytes(LARGE_RANK) - model.adapter_bytes(SMALL_RANK))
    explained_ms = bench.milliseconds(more_bytes)
    return [
        GoalRow(
            number="6",
            what="rank 8 among 7 of rank 64 instead of 8: more time than the bytes explain",
            value=100 * (large_ms - small_ms - explained_ms) / small_ms,
            unit="%",
            bound=Bound.MOST,
            limit=5,
            floor=f"{more_bytes / 1e6:.0f} MB more a step: {explained_ms:.1f} ms",
            details={"small_ms": round(small_ms, 2), "large_ms": round(large_ms, 2)},
        )
    ]


def start_rows(bench: Bench) -> list[GoalRow]:
    """Goal 7: a server's start, and the command's own."""
    flags = ["serve", str(bench.model.folder)]
    log = bench.folder / "start.log"
    starts = start_seconds(flags, log, bench.rounds)
    # Python's own default, which environments switch off at times; the first start fills the folder
    kept = (f"PYTHONPYCACHEPREFIX={bench.folder / 'bytecode'}", "PYTHONDONTWRITEBYTECODE=")
    later = start_seconds(flags, log, bench.rounds + 1, variables=kept)[1:]
    python = sys.executable
    imports = run_seconds([python, "-c", "import lora_server.cli.main"], 3 * bench.rounds)
    helps = run_seconds([python, "-m", "lora_server.cli.main", "--help"], 3 * bench.rounds)
    read_s = bench.milliseconds(bench.model.num_bytes) / 1e3
    return [
        GoalRow(
            number="7a",
            what="start of `serve` to 200 of /health, with the bytecode there is here",
            value=statistics.median(starts),
            unit="s",
            bound=Bound.MOST,
            limit=12,
            floor=f"reading the weights: {read_s:.2f} s",
            details={"rounds": starts},
        ),
        GoalRow(
            number="7b",
            what="the same, with all bytecode kept from an earlier start",
            value=statistics.median(later),
            unit="s",
            bound=Bound.MOST,
            limit=12,
            floor=f"reading the weights: {read_s:.2f} s",
            details={"rounds": later},
        ),
        GoalRow(
            number="7c",
            what="`lora-server --help`",
            value=statistics.median(helps),
            unit="s",
            bound=Bound.MOST,
            limit=1,
            floor="",
            details={"rounds": helps, "import_rounds": imports},
        ),
    ]


def overhead_rows(bench: Bench) -> list[GoalRow]:
    """Goal 8: HTTP and scheduling around a forward pass that sleeps."""
    arguments = bench.flags({})
    log = bench.folder / "asleep.log"
    path = (f"PYTHONPATH={Path(__file__).parent}",)  # under PYTHONSAFEPATH too, as nox sets it
    with started(arguments, log, module="support.asleep", variables=path) as server:
        case = Case(
            url=server.url,
            models=(BASE,),
            num_prompts=NUM_STREAMS,
            concurrency=NUM_STREAMS,
            input_len=STREAM_PROMPT,
            output_len=STREAM_TOKENS,
        )
        found = rates(take_turns({"streams": case}, bench.rounds + 1)["streams"][1:])
    ideal = NUM_STREAMS / STEP_S
    return [
        GoalRow(
            number="8",
            what=f"{NUM_STREAMS} streams, forward of {STEP_S * 1e3:.0f} ms: part of the ideal rate",
            value=statistics.median(found) / ideal,
            unit="",
            bound=Bound.LEAST,
            limit=0.9,
            floor=f"{ideal:.0f} tokens/s: 1",
            details={"rounds": found},
        )
    ]


MEASUREMENTS: tuple[tuple[set[int], Callable[[Bench], list[GoalRow]]], ...] = (
    (SERVING, measure_serving),
    ({4}, prefill_rows),
    ({6}, neighbour_rows),
    ({7}, start_rows),
    ({8}, overhead_rows),
)


def measure(bench: Bench) -> list[dict[str, Any]]:
    """Measure what was chosen; each row says under which conditions."""
    found: list[GoalRow] = []
    for numbers, rows in MEASUREMENTS:
        if numbers & bench.chosen:
            found += rows(bench)
    conditions = {
        "copy_gb_per_s": round(bench.copy_bytes_per_s / 1e9, 1),
        "rounds": bench.rounds,
        "requests_of_a_load": bench.num_prompts,
        "utc": machine()["utc"],
        "commit": machine()["commit"],
    }
    return [{**row.as_dict(), "run": conditions} for row in found]


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the report here")
    parser.add_argument("--merge", type=Path, help="report whose other rows are kept")
    parser.add_argument("--only", default=ALL, help="numbers of goals, separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of everything")
    parser.add_argument("--num-prompts", type=int, default=48, help="requests of a load")
    parser.add_argument("--quick", action="store_true", help="one round, few requests")
    parser.add_argument("--compare", action="store_true", help="compare 1 with torch's operators")
    return parser.parse_args()


def main() -> int:
    """Measure, print the table, write the report."""
    options = read_options()
    # ended from outside, it still ends its servers and removes its folder
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(
            model=prepare_model(),
            folder=Path(name),
            chosen=frozenset(int(number) for number in options.only.split(",")),
            rounds=1 if options.quick else options.rounds,
            num_prompts=16 if options.quick else options.num_prompts,
            with_aten=options.compare,
            copy_bytes_per_s=copy_bytes_per_s(),
        )
        rows = merge_rows(measure(bench), options.merge)
    report = {"rows": rows, "machine": machine()}
    console = Console()
    console.print(goals_table(rows))
    console.print(f"A copy reached {bench.copy_bytes_per_s / 1e9:.1f} GB/s in this run.")
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
