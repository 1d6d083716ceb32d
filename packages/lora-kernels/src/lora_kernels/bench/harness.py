"""Timing, and the rows it yields. Knows nothing of what is timed.

All candidates of a case are timed in turn within each round, so that other load on the machine
falls on all of them alike.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result."""

    mode: str
    """Of the step, such as `decode`."""

    op: str
    """What was timed; a baseline has no operator's name."""

    tokens: int
    slots: int
    rank: int
    popularity: str

    p20: float
    """Microseconds; as `p50` and `p80`."""

    p50: float
    p80: float

    def line(self) -> str:
        """The row as text, under `header()`."""
        name = f"{self.mode:<8} {self.op:<18} {self.tokens:>6} {self.slots:>5} {self.rank:>4}"
        return f"{name} {self.popularity:<9} {self.p20:>9.1f} {self.p50:>9.1f} {self.p80:>9.1f}"


def header() -> str:
    """Column names over `Row.line()`."""
    name = f"{'mode':<8} {'op':<18} {'tokens':>6} {'slots':>5} {'rank':>4}"
    return f"{name} {'spread':<9} {'p20 us':>9} {'p50 us':>9} {'p80 us':>9}"


def time_in_turn(
    candidates: Mapping[str, Callable[[int], object]], *, rounds: int, warm_up: int
) -> dict[str, tuple[float, float, float]]:
    """Time each candidate once a round; return p20, p50 and p80 in microseconds.

    Args:
        candidates: name -> function of the round's number.
        rounds: rounds that count, at least two.
        warm_up: rounds before those.
    """
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(-warm_up, rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            run(number)
            took = time.perf_counter() - start
            if number >= 0:
                samples[name].append(took * _MICROSECONDS)
    return {name: _percentiles(values) for name, values in samples.items()}


def _percentiles(values: list[float]) -> tuple[float, float, float]:
    p20, _, _, p80 = statistics.quantiles(values, n=5, method="inclusive")
    return p20, statistics.median(values), p80
