"""`lora-server bench compare A.json B.json`: what changed between two load tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_server.errors import StartupError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from lora_server.cli.bench.compare import Comparison


def add_parser(bench: argparse.ArgumentParser) -> None:
    """Declare the action below `bench`."""
    actions = bench.add_subparsers(dest="action", metavar="ACTION", required=False)
    parser = actions.add_parser(
        "compare",
        help="compare the JSON files of two load tests",
        description="Compare the JSON files of two load tests, figure by figure.",
        epilog="Exit status: 0, or 1 when a file cannot be read.",
        allow_abbrev=False,
    )
    parser.add_argument("before", type=Path, metavar="A.json", help="the file to compare with")
    parser.add_argument("after", type=Path, metavar="B.json", help="the file that is compared")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run, takes_extras=False)


def run(parsed: argparse.Namespace, extras: Sequence[str]) -> int:
    """Print the comparison and return 0.

    Raises:
        StartupError: a file cannot be read, or is none of `bench --output`.
    """
    from rich.console import Console

    from lora_server.cli.bench.compare import compare_files

    del extras
    contents, problems = [], []
    for path in (parsed.before, parsed.after):
        try:
            contents.append(_read(path))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise StartupError(problems)
    comparison = compare_files(*contents)
    if parsed.json:
        print(json.dumps(comparison.as_dict(), indent=2))
        return 0
    console = Console()
    console.print(comparison_table(comparison))
    for line in note_lines(comparison):
        console.print(line, markup=False, highlight=False)
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or "output_tokens_per_s" not in content:
        raise ValueError(f"{path} holds no figures of lora-server bench --output")
    return content


def comparison_table(comparison: Comparison) -> Table:
    """Return all figures of both files with their ratio."""
    from rich import box
    from rich.table import Table

    table = Table("", "A", "B", "B / A", "noise", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:4]:
        column.justify = "right"
    for one in comparison.differences:
        ratio = "-" if one.ratio is None else f"{one.ratio:.3f}"
        table.add_row(one.figure, f"{one.before:.2f}", f"{one.after:.2f}", ratio, one.noise.value)
    return table


def note_lines(comparison: Comparison) -> Iterator[str]:
    """Say what the last column means, and what else differs between the tests."""
    m, n = comparison.num_runs
    if comparison.chance is None:
        yield f"{m} and {n} runs: how much runs differ is not known; use bench --repeat"
    else:
        yield (
            f"beyond: all runs of one file lie above those of the other. With {m} and {n} runs "
            f"that happens to equal servers in {comparison.chance:.1%} of comparisons"
        )
    for key, (before, after) in comparison.configs.items():
        yield f"differs: {key}: {before} -> {after}"
    for label, names in (("A", comparison.only_before), ("B", comparison.only_after)):
        if names:
            yield f"only in {label}: {', '.join(names)}"
