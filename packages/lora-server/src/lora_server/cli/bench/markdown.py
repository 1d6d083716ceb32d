"""The report of a load test in Markdown, with its plots beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lora_server.cli.bench.figures import LATENCIES, RATES
from lora_server.cli.bench.plots import draw_latencies, draw_models, draw_timeline
from lora_server.cli.bench.report import note_lines, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from lora_server.cli.bench.load import LoadResult

_PLOTS = {
    "latency": "Latencies: share of requests at least as fast",
    "models": "Time to first token by model",
    "timeline": "The first run over time",
}


def write_report(path: Path, figures: dict[str, Any], runs: Sequence[LoadResult]) -> None:
    """Write `path` and, beside it, `NAME-latency.svg`, `NAME-models.svg`, `NAME-timeline.svg`."""
    plots = {name: path.with_name(f"{path.stem}-{name}.svg") for name in _PLOTS}
    answers = [answer for run in runs for answer in run.answers]
    if figures["completed"]:
        draw_latencies(plots["latency"], answers)
        draw_models(plots["models"], figures["per_model"])
        draw_timeline(plots["timeline"], runs[0])
    lines = [*_head(figures), *_tables(figures)]
    if figures["completed"]:
        lines += ["## Plots", ""]
        for name, text in _PLOTS.items():
            lines += [f"![{text}]({plots[name].name.replace(' ', '%20')})", ""]
    path.write_text("\n".join([*lines, *_settings(figures)]), encoding="utf-8")


def _head(figures: dict[str, Any]) -> Iterator[str]:
    yield "# Load test"
    yield ""
    yield (
        f"{figures['started_utc']}, {len(figures['runs'])} run(s), {figures['completed']} requests "
        f"answered, {figures['failed']} failed, {figures['duration_s']:.1f} s."
    )
    yield ""
    for note in note_lines(figures):
        yield f"- {_escaped(note)}"
    for error in figures["errors"]:
        yield f"- {error['count']} x {_escaped(error['message'])}"
    yield ""


def _tables(figures: dict[str, Any]) -> Iterator[str]:
    yield "| | all runs | smallest run | largest run |"
    yield "|---|---:|---:|---:|"
    for key, name in RATES.items():
        values = [run[key] for run in figures["runs"]]
        yield f"| {name} | {figures[key]:.2f} | {min(values):.2f} | {max(values):.2f} |"
    yield ""
    yield "| milliseconds | mean | p50 | p90 | p99 |"
    yield "|---|---:|---:|---:|---:|"
    for key, name in LATENCIES.items():
        yield f"| {name} | {' | '.join(shown(v) for v in figures[key].values())} |"
    yield ""
    yield "## Models"
    yield ""
    yield "| model | requests | failed | TTFT mean | TTFT p90 | TPOT mean | TPOT p90 |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for name, one in figures["per_model"].items():
        cells = [
            shown(one[key][part]) for key in ("ttft_ms", "tpot_ms") for part in ("mean", "p90")
        ]
        yield f"| {_escaped(name)} | {one['requests']} | {one['failed']} | {' | '.join(cells)} |"
    yield ""


def _settings(figures: dict[str, Any]) -> Iterator[str]:
    for title, key in (("Options", "config"), ("Machine of the client", "machine")):
        yield f"## {title}"
        yield ""
        yield "| | |"
        yield "|---|---|"
        for name, value in figures[key].items():
            yield f"| {name} | {_escaped(str(value))} |"
        yield ""


def _escaped(text: str) -> str:
    """Keep a name or a message from ending its cell, or from becoming markup."""
    for mark in "\\`*_{}[]<>|#":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", " ")
