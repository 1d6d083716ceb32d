"""The doctor's findings as a page for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lora_server.cli.advice import ADVICE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lora_server.cli.doctor import Examination
    from lora_weights import AdapterReport, Problem
    from lora_weights.summary import ModuleSummary

_MAX_ROWS = 40
"""Groups of modules that are written out."""


def print_examination(found: Examination, console: Console | None = None) -> None:
    """Print what was found: verdict, problems with advice, warnings, and what it changes."""
    out = console or Console()
    _print_verdict(found, out)
    _print_problems(found.problems, out)
    for warning in found.report.warnings:
        out.print(f"[yellow]note[/]  {escape(warning)}")
    if found.report.modules:
        out.print(_facts(found.report))
        out.print(_table(found.report.modules))


def _print_verdict(found: Examination, out: Console) -> None:
    where = f" on {found.model}" if found.model else ""
    if found.loads:
        out.print(f"[bold green]loads[/]{escape(where)}: {escape(found.report.source)}")
    else:
        count = len(found.problems)
        text = f"{count} problem{'s' if count != 1 else ''}{where}: {found.report.source}"
        out.print(f"[bold red]does not load[/], {escape(text)}")


def _print_problems(problems: Iterable[Problem], out: Console) -> None:
    """Print each problem, and the advice once under the problems it is for."""
    by_advice: dict[str, list[Problem]] = {}
    for problem in problems:
        by_advice.setdefault(ADVICE[problem.code], []).append(problem)
    for advice, group in by_advice.items():
        for problem in group:
            out.print(f"[red]  -[/] {escape(str(problem))}")
        out.print(f"    [bold]->[/] {escape(advice)}")


def _facts(report: AdapterReport) -> str:
    kind = "?" if report.config is None else report.config.peft_type
    digest = "none" if report.digest is None else report.digest[:12]
    base = report.base_model or "not named"
    return escape(
        f"{kind}, rank {report.rank}, {report.num_tensors} tensors,"
        f" {report.weights_bytes / 1e6:.1f} MB, digest {digest}, trained on: {base}"
    )


def _table(modules: Iterable[ModuleSummary]) -> Table:
    """Return the modules by last name part and kind: how many, ranks, size of the update."""
    groups: dict[tuple[str, str], list[ModuleSummary]] = {}
    for summary in modules:
        kinds = "+".join(str(kind) for kind in summary.kinds)
        groups.setdefault((summary.module.rpartition(".")[2], kinds), []).append(summary)
    table = Table("module", "what", "count", "rank", "scaling", "update norm", box=None)
    for (name, kinds), group in list(groups.items())[:_MAX_ROWS]:
        norms = [s.update_norm for s in group if s.update_norm is not None]
        table.add_row(
            escape(name),
            kinds,
            str(len(group)),
            _span([float(s.rank) for s in group]),
            _span([s.scaling for s in group]),
            _span(norms) if norms else "",
        )
    if len(groups) > _MAX_ROWS:
        table.add_row(f"and {len(groups) - _MAX_ROWS} more", "", "", "", "", "")
    return table


def _span(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
