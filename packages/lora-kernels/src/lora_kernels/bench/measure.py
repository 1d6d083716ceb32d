"""From a case to rows: the operator in each backend, and its baselines, timed in turn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from lora_kernels.backend import Backend
from lora_kernels.bench.baselines import dense_product, gathered_products, loop_over_adapters
from lora_kernels.bench.harness import CudaTimer, Row, time_in_turn, time_on_cpu
from lora_kernels.bench.steps import LinearStep, build_step
from lora_kernels.bench.traffic import bytes_of, slot_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lora_kernels.bench.cases import Case
    from lora_kernels.bench.harness import Percentiles, Timer
    from lora_kernels.bench.steps import Step

    Candidate = Callable[[int], object]

READ, BASE = "read slots once", "base products"
_LARGE_BYTES = 128 << 20
_GATHER_LIMIT = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to measure."""

    backends: tuple[Backend, ...]
    device: torch.device
    dtype: torch.dtype = torch.bfloat16

    seconds: float = 1.5
    """Of the timed calls of a case together, unless a candidate's three runs take longer."""

    def timer(self) -> Timer:
        """Return what times a call on this device."""
        return CudaTimer(self.device) if self.device.type == "cuda" else time_on_cpu


def measure_bandwidth(options: Options) -> tuple[list[Row], float]:
    """Time a large read and a large copy.

    Returns:
        Their rows, and the bandwidth that other rows are compared with, in GB/s: of the read on a
        CPU, of the copy (read and written bytes) elsewhere.
    """
    source = torch.ones(_LARGE_BYTES // 4, device=options.device)
    target = torch.empty_like(source)
    candidates: dict[str, Candidate] = {
        "read": lambda _: source.sum(),
        "copy": lambda _: target.copy_(source),
    }
    timed = time_in_turn(candidates, options.timer(), seconds=options.seconds)
    moved = {"read": _LARGE_BYTES, "copy": 2 * _LARGE_BYTES}
    speeds = {name: moved[name] / timed[name].p50 / 1e3 for name in candidates}
    bandwidth = speeds["read" if options.device.type == "cpu" else "copy"]
    rows = [
        Row(
            op="bandwidth",
            implementation=name,
            model="",
            module="",
            mode="",
            popularity="",
            tokens=0,
            slots=0,
            slots_in_use=0,
            rank=0,
            dtype=str(source.dtype).removeprefix("torch."),
            p20_us=times.p20,
            p50_us=times.p50,
            p80_us=times.p80,
            runs=times.runs,
            bytes=moved[name],
            gb_per_s=speeds[name],
            of_bandwidth=speeds[name] / bandwidth,
            times_read=None,
            times_base=None,
        )
        for name, times in timed.items()
    ]
    return rows, bandwidth


def measure_case(case: Case, options: Options, bandwidth: float) -> list[Row]:
    """Time a case.

    Args:
        case: what to run.
        options: how.
        bandwidth: from `measure_bandwidth`, in GB/s.
    """
    steps = [
        build_step(case, module, dtype=options.dtype, device=options.device)
        for module in case.modules
    ]
    candidates: dict[str, Candidate] = {READ: _each(steps, lambda step, n: step.read(n))}
    for backend in options.backends:
        candidates[backend.value] = _on_device(
            _each(steps, partial(_run, backend=backend)), backend, options
        )
    linears = [step for step in steps if isinstance(step, LinearStep)]
    if linears:
        candidates["loop over adapters"] = _each(linears, loop_over_adapters)
        if sum(map(_gathered_bytes, linears)) < _GATHER_LIMIT:
            candidates["gathered bmm"] = _each(linears, gathered_products)
    if case.op == "layer":
        candidates |= _with_base(linears, options)
    else:
        product = dense_product(steps[0], dtype=options.dtype, device=options.device)
        candidates["dense of equal flops"] = lambda _: product()
    timed = time_in_turn(candidates, options.timer(), seconds=options.seconds)
    return [
        _row(case, steps, name, timed, dtype=options.dtype, bandwidth=bandwidth) for name in timed
    ]


def _run(step: Step, number: int, *, backend: Backend) -> object:
    return step.run(number, backend)


def _each(steps: Sequence[Step], run: Callable[..., object]) -> Candidate:
    def candidate(number: int) -> None:
        for step in steps:
            run(step, number)

    return candidate


def _with_base(steps: Sequence[LinearStep], options: Options) -> dict[str, Candidate]:
    """Return the layer's own products alone, and with `apply_lora_` right after each."""
    bases = [
        [
            torch.randn(sum(step.module.out_features), step.module.in_features)
            .mul_(step.module.in_features**-0.5)
            .to(options.device, options.dtype)
            for _ in range(min(len(step.weights) for step in steps))
        ]
        for step in steps
    ]

    def products(number: int) -> None:
        for step, base in zip(steps, bases, strict=True):
            linear(step.x, base[number % len(base)])

    def products_and_lora(number: int, backend: Backend) -> None:
        for step, base in zip(steps, bases, strict=True):
            step.add(linear(step.x, base[number % len(base)]), number, backend)

    candidates: dict[str, Candidate] = {BASE: products}
    for backend in options.backends:
        if backend is not Backend.REFERENCE:
            run = partial(products_and_lora, backend=backend)
            candidates[f"base, then {backend.value}"] = _on_device(run, backend, options)
    return candidates


def _on_device(run: Candidate, backend: Backend, options: Options) -> Candidate:
    """Make a CUDA graph of a call whose launches would take longer than its work."""
    if options.device.type != "cuda" or backend is not Backend.TRITON:
        return run
    run(0)  # compiles, and fills the tables of the routing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(0)
    return lambda _: graph.replay()


def _gathered_bytes(step: LinearStep) -> int:
    elements = step.module.in_features * len(step.module.out_features)
    elements += sum(step.module.out_features)
    return step.load.entries * step.load.rank * elements * step.load.element_size


def _row(
    case: Case,
    steps: Sequence[Step],
    name: str,
    timed: dict[str, Percentiles],
    *,
    dtype: torch.dtype,
    bandwidth: float,
) -> Row:
    count = slot_bytes if name == READ else bytes_of
    moved = sum(count(step.op, step.module, step.load) for step in steps)
    times, base = timed[name], timed.get(BASE)
    speed = moved / times.p50 / 1e3
    has_bytes = not name.startswith("base") and name != "dense of equal flops"
    return Row(
        op=case.op,
        implementation=name,
        model=case.model,
        module="+".join(step.module.name for step in steps),
        mode="prefill" if case.is_prefill else "decode",
        popularity=case.popularity.value,
        tokens=case.tokens,
        slots=case.slots,
        slots_in_use=steps[0].num_slots_in_use,
        rank=case.rank,
        dtype=str(dtype).removeprefix("torch."),
        p20_us=times.p20,
        p50_us=times.p50,
        p80_us=times.p80,
        runs=times.runs,
        bytes=moved if has_bytes else 0,
        gb_per_s=speed if has_bytes else 0.0,
        of_bandwidth=speed / bandwidth if has_bytes else 0.0,
        times_read=times.p50 / timed[READ].p50,
        times_base=times.p50 / base.p50 if base else None,
    )
