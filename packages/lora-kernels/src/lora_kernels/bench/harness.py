"""Timing, and the rows it yields. Knows nothing of what is timed.

All candidates of a case are timed in turn within each round, so that other load on the machine
falls on all of them alike.
"""

from __future__ import annotations

import csv
import statistics
import time
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TextIO

_MICROSECONDS = 1e6
_MIN_ROUNDS, _MAX_ROUNDS = 3, 400
_FLUSHED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of the runs of one candidate, in microseconds."""

    p20: float
    p50: float
    p80: float
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result."""

    op: str
    """The operator; `layer` for `apply_lora_` over the four modules of a layer; `bandwidth`."""

    implementation: str
    """A backend, or a baseline: see the README of the package."""

    model: str
    module: str

    mode: str
    """`prefill` if tokens lie together by slot, else `decode`."""

    popularity: str
    tokens: int
    slots: int

    slots_in_use: int

    rank: int
    dtype: str

    p20_us: float
    p50_us: float
    p80_us: float

    runs: int

    bytes: int
    """Bytes that must move, from `traffic`; those it reads for `read slots once`."""

    gb_per_s: float
    """`bytes` through the median time."""

    of_bandwidth: float
    """`gb_per_s` through what a large read reaches in the same run; a large copy on a GPU."""

    times_read: float | None
    """Median through the median of `read slots once` in the same rounds."""

    times_base: float | None
    """Median through the median of the layer's own products in the same rounds."""

    def line(self) -> str:
        """The row as text, under `header()`."""
        times = [
            f"{'' if value is None else f'{value:.2f}':>7}"
            for value in (self.times_read, self.times_base)
        ]
        return (
            f"{self.op:<15} {self.implementation:<22} {self.model:<12} {self.mode:<7} "
            f"{self.popularity:<9} {self.tokens:>4} {self.slots:>3} {self.rank:>3} "
            f"{self.p20_us:>9.1f} {self.p50_us:>9.1f} {self.p80_us:>9.1f} {self.gb_per_s:>8.2f} "
            f"{self.of_bandwidth:>5.2f} {' '.join(times)}"
        )


def header() -> str:
    """Column names over `Row.line()`."""
    return (
        f"{'op':<15} {'implementation':<22} {'model':<12} {'mode':<7} {'spread':<9} {'tok':>4} "
        f"{'N':>3} {'r':>3} {'p20 us':>9} {'p50 us':>9} {'p80 us':>9} {'GB/s':>8} {'of bw':>5} "
        f"{'x read':>7} {'x base':>7}"
    )


class CsvWriter:
    """Writes rows at once, so that an interrupted run leaves a whole file."""

    def __init__(self, stream: TextIO, machine: str) -> None:
        """Write the machine as a comment, then the names of the columns."""
        self._stream = stream
        stream.write(f"# {machine}\n")
        names = [field.name for field in fields(Row)]
        self._writer = csv.DictWriter(stream, names, lineterminator="\n")
        self._writer.writeheader()
        stream.flush()

    def write(self, row: Row) -> None:
        """Append a row; floats keep four significant digits."""
        values = {
            name: f"{value:.4g}" if isinstance(value, float) else value
            for name, value in asdict(row).items()
        }
        self._writer.writerow(values)
        self._stream.flush()


class Timer(Protocol):
    """Times one call."""

    def __call__(self, run: Callable[[int], object], number: int) -> float:
        """Return the seconds that `run(number)` took."""


def time_on_cpu(run: Callable[[int], object], number: int) -> float:
    """Time with the wall clock; what starting the operators costs is part of it."""
    start = time.perf_counter()
    run(number)
    return time.perf_counter() - start


class CudaTimer:
    """Times between two events, with the level-2 cache overwritten before.

    The launches are part of it where the device waits for them; candidates that are CUDA graphs
    have one launch.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate what overwrites the cache."""
        self._flush = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device)
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[int], object], number: int) -> float:
        """Return the seconds between the events."""
        self._flush.zero_()
        self._start.record()
        run(number)
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3


def time_in_turn(
    candidates: Mapping[str, Callable[[int], object]],
    timer: Timer,
    *,
    seconds: float,
    warm_up: int = 2,
) -> dict[str, Percentiles]:
    """Time each candidate once a round until each has had its share of the time.

    Every call gets another number, so that weights kept in several copies come from where they lie
    in a real step, not from the cache that the candidate before has filled.

    Args:
        candidates: name -> function of a number that grows by one at every call.
        timer: times one call.
        seconds: of all candidates together; each runs at least three times.
        warm_up: rounds before those that count.
    """
    share = seconds / len(candidates)
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    number = 0
    for round_idx in range(-warm_up, _MAX_ROUNDS):
        for name, run in candidates.items():
            taken = samples[name]
            if len(taken) >= _MIN_ROUNDS and sum(taken) >= share:
                continue
            took = timer(run, number)
            number += 1
            if round_idx >= 0:
                taken.append(took)
    return {name: _percentiles(values) for name, values in samples.items()}


def _percentiles(seconds: list[float]) -> Percentiles:
    p20, _, _, p80 = statistics.quantiles(seconds, n=5, method="inclusive")
    p50 = statistics.median(seconds)
    return Percentiles(
        p20=p20 * _MICROSECONDS,
        p50=p50 * _MICROSECONDS,
        p80=p80 * _MICROSECONDS,
        runs=len(seconds),
    )
