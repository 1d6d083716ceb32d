"""Which bytes of a tensor file are wanted: whole tensors, some of their rows, or nothing.

Opens no file and knows nothing of what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lora_weights.tensor_format import TensorEntry

if TYPE_CHECKING:
    from collections.abc import Iterable

Selector = Callable[[TensorEntry], range | None]
"""Returns the rows (of the first dimension) wanted of a tensor, none of them to leave it out; None
for all of it."""

ALIGNMENT = 64
"""Bytes; a multiple of the width of every type."""


@dataclass(slots=True)
class Read:
    """One stretch of a file and where it goes."""

    source: int
    """First byte, counted from the start of the file's data."""
    target: int
    """Where it goes, counted from the start of the memory of this file."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """What to read of one file."""

    entries: tuple[TensorEntry, ...]
    """The tensors wanted, with their places in memory; fewer rows than stored where cut."""
    reads: tuple[Read, ...]
    """The stretches to read, in the order of the file."""
    size: int
    """Bytes of memory they take."""


def cut_entries(entries: Iterable[TensorEntry], select: Selector) -> tuple[TensorEntry, ...]:
    """Return the tensors and rows wanted, at the places where they lie."""
    found = (_cut(entry, select(entry)) for entry in entries)
    return tuple(entry for entry in found if entry is not None)


def plan_reads(entries: Iterable[TensorEntry], select: Selector) -> ReadPlan:
    """Return what to read of a file; neighbours in the file stay neighbours in memory.

    Args:
        entries: the file's tensors, in the order of their data.
        select: what is wanted of each.
    """
    found: list[TensorEntry] = []
    reads: list[Read] = []
    for wanted in cut_entries(entries, select):
        last = reads[-1] if reads else Read(0, 0, 0)
        is_next = wanted.start == last.source + last.size
        target = last.target + last.size
        if not is_next:
            target = -(-target // ALIGNMENT) * ALIGNMENT
        size = wanted.end - wanted.start
        if is_next and reads:
            last.size += size
        else:
            reads.append(Read(wanted.start, target, size))
        found.append(replace(wanted, start=target, end=target + size))
    size = reads[-1].target + reads[-1].size if reads else 0
    return ReadPlan(entries=tuple(found), reads=tuple(reads), size=size)


def _cut(entry: TensorEntry, rows: range | None) -> TensorEntry | None:
    """Return a tensor of some of its rows, at their place in the file; None for no rows."""
    if rows is None:
        return entry
    if not rows:
        return None
    assert rows.step == 1
    assert 0 <= rows.start < rows.stop <= entry.shape[0]
    width = (entry.end - entry.start) // entry.shape[0]
    return replace(
        entry,
        shape=(len(rows), *entry.shape[1:]),
        start=entry.start + rows.start * width,
        end=entry.start + rows.stop * width,
    )
