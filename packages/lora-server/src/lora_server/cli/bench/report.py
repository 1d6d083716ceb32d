"""Shows the figures of a load test to people, and says on which machine they were taken."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from lora_server.cli.bench.figures import LATENCIES

if TYPE_CHECKING:
    from collections.abc import Iterator

_WORST_TOLD_FROM = 2
"""Models; of a single one it is no news."""


def describe_machine(cpu_info: Path = Path("/proc/cpuinfo")) -> dict[str, str | int]:
    """Say what the client runs on; the server's machine too when it is the same one."""
    model = platform.processor() or platform.machine()
    if cpu_info.is_file():
        for line in cpu_info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
                break
    return {
        "cpu": model,
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def figures_table(figures: dict[str, Any]) -> Table:
    """Return the figures as a table for a terminal."""
    table = Table("", "mean", "p50", "p90", "p99", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("output tokens/s", f"{figures['output_tokens_per_s']:.1f}")
    table.add_row("requests/s", f"{figures['requests_per_s']:.2f}")
    if (good := figures["goodput"]) is not None:
        table.add_row("goodput, requests/s", f"{good['requests_per_s']:.2f}")
    for key, name in LATENCIES.items():
        cells = (shown(value) for value in figures[key].values())
        table.add_row(f"{name}, ms", *cells)
    table.add_row("completed", str(figures["completed"]))
    table.add_row("failed", str(figures["failed"]))
    table.add_row("duration, s", f"{figures['duration_s']:.1f}")
    return table


def note_lines(figures: dict[str, Any]) -> Iterator[str]:
    """Name the slowest models, and the share of good answers."""
    if len(figures["per_model"]) >= _WORST_TOLD_FROM:
        for key in ("ttft_ms", "tpot_ms"):
            if (worst := figures["worst_model"][key]) is not None:
                mean = figures["per_model"][worst][key]["mean"]
                yield f"slowest in {LATENCIES[key]}: {worst}, {mean:.1f} ms in the mean"
    if (good := figures["goodput"]) is not None:
        asked = ", ".join(f"{name} {limit:g} ms" for name, limit in good["objectives_ms"].items())
        yield f"within {asked}: {good['good']} requests, {good['share']:.1%}"


def error_lines(figures: dict[str, Any]) -> list[Text]:
    """Return one line for each kind of failure, and for answers shorter than asked for."""
    lines = [Text(f"{e['count']} x {e['message']}") for e in figures["errors"]]
    if figures["short_answers"]:
        lines.append(Text(f"{figures['short_answers']} answers were shorter than asked for"))
    if figures["tokens_counted_by"] == "events":
        lines.append(Text("the server reports no usage: every event counts as one token"))
    return lines


def shown(value: float | None) -> str:
    """Return a figure for a table."""
    return "-" if value is None else f"{value:.1f}"
