"""Rows of a table of goals: what was asked, what was measured, and what no program could beat."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


class Bound(StrEnum):
    """On which side of its limit a figure should be."""

    LEAST = "at least"
    MOST = "at most"
    NONE = "no goal"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalRow:
    """One goal and its figure."""

    number: str
    """The goal's number; a letter tells apart figures of one goal."""
    what: str
    value: float
    """What was measured, the median of the rounds."""
    unit: str
    """Of the value and of the limit; empty for ratios."""
    bound: Bound
    limit: float = 0.0
    floor: str
    """What bytes or arithmetic alone would need."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Figures of the single rounds, and what the value was made from."""

    @property
    def is_met(self) -> bool | None:
        """Whether the figure is on the right side; None where no goal was set."""
        match self.bound:
            case Bound.LEAST:
                return self.value >= self.limit
            case Bound.MOST:
                return self.value <= self.limit
            case Bound.NONE:
                return None

    def as_dict(self) -> dict[str, Any]:
        """Return the row ready for JSON."""
        content = {**asdict(self), "value": round(self.value, 3), "is_met": self.is_met}
        return {**content, "limit": None if self.bound is Bound.NONE else round(self.limit, 3)}


def goals_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Lay out rows in the form of `GoalRow.as_dict`."""
    table = Table("", "what", "goal", "measured", "met", "floor")
    words = {True: "yes", False: "no", None: ""}
    for row in rows:
        limit = "" if row["limit"] is None else f"{row['bound']} {row['limit']:g} {row['unit']}"
        table.add_row(
            row["number"],
            row["what"],
            limit.strip(),
            f"{row['value']:g} {row['unit']}".strip(),
            words[row["is_met"]],
            row["floor"],
        )
    return table


def merge_rows(rows: list[dict[str, Any]], file: Path | None) -> list[dict[str, Any]]:
    """Add the rows of an earlier report whose numbers were not measured again, in order."""
    earlier = [] if file is None else json.loads(file.read_text(encoding="utf-8"))["rows"]
    measured = {row["number"] for row in rows}
    kept = [row for row in earlier if row["number"] not in measured]
    return sorted([*kept, *rows], key=lambda row: row["number"])
