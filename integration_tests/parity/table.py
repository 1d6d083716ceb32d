"""The table as a page: `python -m parity.table > ../docs/reference/formats.md`, run from here."""

from __future__ import annotations

import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from parity.bases import BASES
from parity.measure import Cell, MixedBatch
from parity.rows import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from parity.bases import Base

_HEAD = """\
# Adapter formats

What each format of adapter does on each kind of base model. PEFT makes, saves and runs an adapter
with random weights; the same folder is then loaded and run in a mixed batch, between rows of
another adapter and rows of the base. A number is the largest difference of any logit to PEFT's,
in float32 (logits move by about 1 to 10 under these adapters). Where PEFT has no such adapter -
names of one model's projections on another's - the expected logits come from merged weights.

Bases are tiny random models: Llama with biases, GPT-2 (Conv1D), Phi-3 (fused projections), BERT
with a classification head, Mixtral (fused experts). "-" means that the base has nothing the format
could be about, or that PEFT makes none for it. R and a number is a refusal, spelled out below.

Written by `python -m parity.table` in `integration_tests`; a test compares it with a new run.
"""


_NUMBER = re.compile(r"0|\de-\d\d")


def measure_base(base: Base, folder: Path) -> dict[str, Cell]:
    """Measure every format on one base: name of the format -> cell."""
    batch = MixedBatch(base, folder / "neighbour")
    cells = {}
    for index, adapter_format in enumerate(FORMATS):
        cells[adapter_format.name] = batch.measure(adapter_format, folder / str(index))
    return cells


def render(table: Mapping[str, Mapping[str, Cell]]) -> str:
    """Return the page.

    Args:
        table: name of the base -> name of the format -> cell.
    """
    letters: dict[str, str] = {}

    def shown(cell: Cell) -> str:
        if cell.difference is not None:
            return f"{cell.difference:.0e}" if cell.difference else "0"
        if not cell.refusal:
            return "-"
        return letters.setdefault(summary(cell), f"R{len(letters) + 1}")

    rows = [
        " | ".join((name, *(shown(cells[name]) for cells in table.values())))
        for name in (adapter_format.name for adapter_format in FORMATS)
    ]
    lines = [
        _HEAD,
        f"| format | {' | '.join(table)} |",
        f"|---|{'---|' * len(table)}",
        *(f"| {row} |" for row in rows),
        "",
        "## Refusals",
        "",
        *(f"- **{letter}**: {text}" for text, letter in letters.items()),
        "",
    ]
    return "\n".join(lines)


def summary(cell: Cell) -> str:
    """Return a refusal in one line: its first problem, and how many more there are."""
    first, *others = cell.refusal
    text = first.replace("\n", " ")
    return text if not others else f"{text} (and {len(others)} more)"


def outcomes(page: str) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a page with numbers replaced by "=", since they differ by machine."""
    for line in page.splitlines():
        if line.startswith("| "):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            yield tuple("=" if _NUMBER.fullmatch(cell) else cell for cell in cells)


def main() -> None:
    """Print the page."""
    warnings.simplefilter("ignore")
    table = {}
    for base in BASES.values():
        with tempfile.TemporaryDirectory() as folder:
            table[base.name] = measure_base(base, Path(folder))
    sys.stdout.write(render(table))


if __name__ == "__main__":
    main()
