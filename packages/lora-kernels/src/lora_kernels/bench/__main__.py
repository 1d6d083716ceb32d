"""Time the operators on this machine, in each backend and beside baselines.

Prints each row as soon as it is known and, with --output, writes it to a CSV file at once.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lora_kernels.backend import Backend
from lora_kernels.bench.cases import all_cases, quick_cases
from lora_kernels.bench.harness import CsvWriter, header
from lora_kernels.bench.machine import machine_line
from lora_kernels.bench.measure import Options, measure_bandwidth, measure_case

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lora_kernels.bench.cases import Case
    from lora_kernels.bench.harness import Row


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    device = torch.device(chosen.device)
    backends = tuple(map(Backend, chosen.backend)) or _default_backends(device)
    options = Options(
        backends=backends,
        device=device,
        dtype=getattr(torch, chosen.dtype),
        seconds=chosen.seconds,
    )
    cases = (quick_cases if chosen.quick else all_cases)(device.type)
    if chosen.op:
        cases = [case for case in cases if case.op in chosen.op]
    if chosen.model:
        cases = [case for case in cases if case.model in chosen.model]
    if not cases:
        parser.error(f"no case has op {chosen.op} and model {chosen.model}")
    run(cases, options, output=chosen.output, plot=chosen.plot)


def run(cases: Sequence[Case], options: Options, *, output: Path | None, plot: Path | None) -> None:
    """Measure the cases one after the other; whatever is done when it is interrupted is kept."""
    machine = machine_line(options.device)
    print(machine)
    print(header())
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        writer = None
        if output is not None:
            stream = stack.enter_context(output.open("w", encoding="utf-8", newline=""))
            writer = CsvWriter(stream, machine)
        stack.enter_context(torch.inference_mode())
        found, bandwidth = measure_bandwidth(options)
        for case in (None, *cases):
            if case is not None:
                found = measure_case(case, options, bandwidth)
            for row in found:
                print(row.line(), flush=True)
                if writer is not None:
                    writer.write(row)
            rows += found
    if plot is not None:
        from lora_kernels.bench.plot import plot_rows

        plot_rows(rows, plot, machine)


def _default_backends(device: torch.device) -> tuple[Backend, ...]:
    if device.type == "cuda":
        return Backend.TRITON, Backend.ATEN
    return Backend.ATEN, Backend.REFERENCE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lora_kernels.bench", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="the main cases: under four minutes on two cores")
    add("--output", type=Path, metavar="FILE.csv", help="write the rows there, each at once")
    add("--plot", type=Path, metavar="FILE.png", help="draw them there (extra `bench`)")
    add("--backend", action="append", default=[], choices=[*Backend], help="may be repeated")
    add("--op", action="append", default=[], help="only this operator, or `layer`; repeatable")
    add("--model", action="append", default=[], help="only this model; repeatable")
    add("--device", default="cpu", help="such as cpu or cuda")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add("--threads", type=int, help="of torch on a CPU; default: torch's own choice")
    add("--seconds", type=float, default=1.5, help="of timed calls a case")
    return parser


if __name__ == "__main__":
    main()
