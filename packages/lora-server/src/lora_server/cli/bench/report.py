"""Sums up a load test: the figures, the machine, a table for people and a file for programs."""

from __future__ import annotations

import math
import os
import platform
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lora_server.cli.bench.load import LoadResult

_PERCENTILES = (50, 90, 99)
_LATENCIES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "time between events",
}


def summarise(result: LoadResult, *, input_len: int, output_len: int) -> dict[str, Any]:
    """Return the figures of a load test, ready for JSON; requests that failed count as errors only.

    Latencies are in milliseconds, `null` where nothing was measured.
    """
    good = [answer for answer in result.answers if answer.error is None]
    failed = Counter(answer.error for answer in result.answers if answer.error is not None)
    output_tokens = sum(answer.output_tokens for answer in good)
    tpots = [tpot for answer in good if (tpot := answer.tpot_s) is not None]
    return {
        "output_tokens_per_s": output_tokens / result.duration_s,
        "requests_per_s": len(good) / result.duration_s,
        "total_tokens_per_s": (output_tokens + input_len * len(good)) / result.duration_s,
        "ttft_ms": spread([answer.ttft_s for answer in good]),
        "tpot_ms": spread(tpots),
        "itl_ms": spread([itl for answer in good for itl in answer.itls_s]),
        "duration_s": result.duration_s,
        "completed": len(good),
        "failed": len(result.answers) - len(good),
        "errors": [{"message": text, "count": n} for text, n in failed.most_common()],
        "input_tokens": input_len * len(good),
        "output_tokens": output_tokens,
        "short_answers": sum(answer.output_tokens < output_len for answer in good),
        "tokens_counted_by": "server"
        if all(answer.is_counted_by_server for answer in good)
        else "events",
        "requests_per_model": dict(sorted(Counter(a.model for a in result.answers).items())),
    }


def spread(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return mean and percentiles in milliseconds."""
    if not seconds:
        return dict.fromkeys(("mean", *(f"p{p}" for p in _PERCENTILES)))
    ordered = sorted(seconds)
    figures = {"mean": math.fsum(ordered) / len(ordered)}
    figures |= {f"p{p}": percentile(ordered, p) for p in _PERCENTILES}
    return {name: value * 1000 for name, value in figures.items()}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values, linear between neighbours."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


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
    for key, name in _LATENCIES.items():
        row = figures[key].values()
        cells = ("-" if value is None else f"{value:.1f}" for value in row)
        table.add_row(f"{name}, ms", *cells)
    table.add_row("completed", str(figures["completed"]))
    table.add_row("failed", str(figures["failed"]))
    table.add_row("duration, s", f"{figures['duration_s']:.1f}")
    return table


def error_lines(figures: dict[str, Any]) -> list[Text]:
    """Return one line for each kind of failure, and for answers shorter than asked for."""
    lines = [Text(f"{e['count']} x {e['message']}") for e in figures["errors"]]
    if figures["short_answers"]:
        lines.append(Text(f"{figures['short_answers']} answers were shorter than asked for"))
    if figures["tokens_counted_by"] == "events":
        lines.append(Text("the server reports no usage: every event counts as one token"))
    return lines
