"""Compares two load tests, and says which differences are more than the noise of their runs.

A figure differs beyond the noise when the runs of one file all lie above those of the other. Of two
equal servers that happens by chance in `2 m! n! / (m + n)!` of all comparisons, with m and n runs
and whatever the distribution: one in 10 for three runs each, one in 126 for five.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class Noise(StrEnum):
    """What a difference means."""

    BEYOND = "beyond"
    """All runs of one file lie above all runs of the other."""
    WITHIN = "within"
    UNKNOWN = "unknown"
    """A file holds one run, so that its spread is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One figure in both files."""

    figure: str
    """Such as `ttft_ms.p99`."""
    before: float
    after: float
    noise: Noise
    spread_before: tuple[float, float]
    """Smallest and largest of the runs."""
    spread_after: tuple[float, float]

    @property
    def ratio(self) -> float | None:
        """After over before."""
        return self.after / self.before if self.before else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two files side by side."""

    differences: tuple[Difference, ...]
    only_before: tuple[str, ...]
    """Figures that the second file lacks."""
    only_after: tuple[str, ...]
    configs: dict[str, tuple[Any, Any]]
    """Options and parts of the machine that differ."""
    num_runs: tuple[int, int]

    @property
    def chance(self) -> float | None:
        """How often runs of two equal servers would be apart; None when that is never told."""
        m, n = self.num_runs
        return None if min(m, n) < 2 else 2 / math.comb(m + n, n)  # noqa: PLR2004 - runs to differ

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "differences": [
                {
                    "figure": one.figure,
                    "before": one.before,
                    "after": one.after,
                    "ratio": one.ratio,
                    "noise": one.noise.value,
                    "runs_before": list(one.spread_before),
                    "runs_after": list(one.spread_after),
                }
                for one in self.differences
            ],
            "only_before": list(self.only_before),
            "only_after": list(self.only_after),
            "config": {key: list(pair) for key, pair in self.configs.items()},
            "num_runs": list(self.num_runs),
            "chance": self.chance,
        }


def compare_files(before: dict[str, Any], after: dict[str, Any]) -> Comparison:
    """Compare the figures of two files of `lora-server bench --output`.

    Files from before there were runs are taken for one run.
    """
    runs = [_runs(before), _runs(after)]
    figures = [_flat(before), _flat(after)]
    common = [name for name in figures[0] if name in figures[1]]
    return Comparison(
        differences=tuple(_difference(name, figures, runs) for name in common),
        only_before=tuple(name for name in figures[0] if name not in figures[1]),
        only_after=tuple(name for name in figures[1] if name not in figures[0]),
        configs={
            **_differing(before.get("config"), after.get("config")),
            **_differing(before.get("machine"), after.get("machine")),
        },
        num_runs=(len(runs[0]), len(runs[1])),
    )


def _difference(
    name: str, figures: Sequence[dict[str, float]], runs: Sequence[list[dict[str, float]]]
) -> Difference:
    values = [[run[name] for run in each if name in run] for each in runs]
    spreads = [(min(each), max(each)) for each in values]
    return Difference(
        figure=name,
        before=figures[0][name],
        after=figures[1][name],
        noise=judge(*values),
        spread_before=spreads[0],
        spread_after=spreads[1],
    )


def judge(before: Sequence[float], after: Sequence[float]) -> Noise:
    """Say whether the runs of one side all lie above those of the other."""
    if min(len(before), len(after)) < 2:  # noqa: PLR2004 - one value has no spread
        return Noise.UNKNOWN
    is_apart = max(before) < min(after) or max(after) < min(before)
    return Noise.BEYOND if is_apart else Noise.WITHIN


def _runs(content: dict[str, Any]) -> list[dict[str, float]]:
    return [_flat(run) for run in content.get("runs") or [content]]


def _flat(figures: dict[str, Any]) -> dict[str, float]:
    """Return the numbers that are compared, by name."""
    flat: dict[str, float] = {}
    for key, value in figures.items():
        if key.endswith("_per_s") and isinstance(value, int | float):
            flat[key] = float(value)
        elif key.endswith("_ms") and isinstance(value, dict):
            numbers = {f"{key}.{part}": number for part, number in value.items()}
            flat |= {name: float(n) for name, n in numbers.items() if n is not None}
    good = figures.get("goodput")
    if isinstance(good, dict):
        flat["goodput.requests_per_s"] = float(good["requests_per_s"])
    return flat


def _differing(before: Any, after: Any) -> dict[str, tuple[Any, Any]]:
    one, other = (part if isinstance(part, dict) else {} for part in (before, after))
    keys = dict.fromkeys((*one, *other))
    pairs = {key: (one.get(key), other.get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
