"""Plots of a load test as SVG files. Needs matplotlib, which the extra `bench` brings."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from lora_server.cli.bench.client import Answer
    from lora_server.cli.bench.load import LoadResult

_WIDTH, _HEIGHT = 8.0, 3.2
"""Inches."""
_MAX_MODELS = 40
"""Bars of the plot of models; the slowest are shown."""
_NUM_BINS = 60
"""Of the timeline."""


def missing_extra() -> list[str]:
    """Return the problem of a report without matplotlib, or nothing."""
    if find_spec("matplotlib") is not None:
        return []
    return ["--report needs matplotlib: install lora-server[bench]"]


def draw_latencies(path: Path, answers: Sequence[Answer]) -> None:
    """Draw which share of requests was at least as fast, for the first token and the next ones."""
    figure, axes = _figure(2)
    good = [answer for answer in answers if answer.error is None]
    ttfts = [answer.ttft_s * 1000 for answer in good]
    tpots = [tpot * 1000 for answer in good if (tpot := answer.tpot_s) is not None]
    for part, values, name in zip(
        axes, (ttfts, tpots), ("time to first token, ms", "time per output token, ms"), strict=True
    ):
        ordered = sorted(values)
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        part.step(ordered, shares, where="post")
        part.set(xlabel=name, ylabel="share of requests", ylim=(0, 1.02))
        part.set_xlim(left=0)
    figure.savefig(path)


def draw_models(path: Path, models: dict[str, dict[str, Any]]) -> None:
    """Draw mean and 90th percentile of the time to the first token, by model, slowest first."""
    means = {name: one["ttft_ms"] for name, one in models.items()}
    measured = {name: s for name, s in means.items() if s["mean"] is not None}
    names = sorted(measured, key=lambda name: -measured[name]["mean"])[:_MAX_MODELS]
    figure, (part,) = _figure(1, height=max(_HEIGHT, 0.25 * len(names) + 1))
    rows = range(len(names))
    part.barh(rows, [measured[name]["mean"] for name in names], label="mean")
    part.plot([measured[name]["p90"] for name in names], rows, "k|", label="p90")
    part.set_yticks(rows, names, parse_math=False)
    part.invert_yaxis()
    part.set(xlabel="time to first token, ms")
    part.legend()
    figure.savefig(path)


def draw_timeline(path: Path, run: LoadResult) -> None:
    """Draw tokens per second and requests in flight over the time of one run."""
    figure, axes = _figure(2)
    good = [answer for answer in run.answers if answer.error is None]
    width = run.duration_s / _NUM_BINS
    times = [answer.sent_s + at for answer in good for at in answer.token_times_s]
    # an event may hold several tokens: each then counts for as many
    weights = [
        answer.output_tokens / len(answer.token_times_s) / width
        for answer in good
        for _ in answer.token_times_s
    ]
    axes[0].hist(times, bins=_NUM_BINS, range=(0, run.duration_s), weights=weights)
    axes[0].set(xlabel="seconds", ylabel="output tokens/s")
    moments, counts = in_flight(good)
    axes[1].step(moments, counts, where="post")
    axes[1].set(xlabel="seconds", ylabel="requests in flight", xlim=(0, run.duration_s))
    axes[1].set_ylim(bottom=0)
    figure.savefig(path)


def in_flight(answers: Sequence[Answer]) -> tuple[list[float], list[int]]:
    """Return the moments at which requests begin and end, and how many are open from each on."""
    changes = [(answer.sent_s, 1) for answer in answers]
    changes += [(answer.sent_s + answer.duration_s, -1) for answer in answers]
    moments, counts, num_open = [], [], 0
    for moment, change in sorted(changes):
        num_open += change
        moments.append(moment)
        counts.append(num_open)
    return moments, counts


def _figure(num_parts: int, *, height: float = _HEIGHT) -> tuple[Any, Sequence[Axes]]:
    """Make an empty figure without pyplot, which would keep it and choose a window system."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    parts = figure.subplots(1, num_parts, squeeze=False)[0]
    return figure, list(parts)
