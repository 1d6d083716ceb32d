"""What the columns of a classification head mean: names, kind of problem, thresholds.

Read from the base's configuration, or from the files beside an adapter. Knows no tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from lora_server.errors import StartupError

LABEL_FILE: Final = "config.json"
"""File beside an adapter in which its labels are looked for when `adapter_config.json` is silent;
the name and the fields are transformers'."""

DEFAULT_THRESHOLD: Final = 0.5
"""Probability from which a label of several independent ones counts as given."""

_MAX_FILE_BYTES: Final = 16 * 1024**2


class ProblemType(StrEnum):
    """How logits become what is told of them; the values are transformers'."""

    SINGLE_LABEL = "single_label_classification"
    """Softmax over the labels; with a single one its sigmoid."""
    MULTI_LABEL = "multi_label_classification"
    """A sigmoid for each label."""
    REGRESSION = "regression"
    """The numbers themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSet:
    """The labels of one head."""

    names: tuple[str, ...]
    """One a column."""
    problem_type: ProblemType = ProblemType.SINGLE_LABEL
    thresholds: tuple[float, ...] = ()
    """One a column."""

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelNotes:
    """What a file says of labels; what it leaves out is None or empty."""

    names: Mapping[int, str]
    """Column -> name."""
    problem_type: ProblemType | None
    thresholds: Mapping[int, float]
    """Column -> threshold."""
    default_threshold: float | None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is said."""
        return not (
            self.names or self.problem_type or self.thresholds or self.default_threshold is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLabels:
    """What an adapter brings of a classification head."""

    num_labels: int | None
    """Labels of its own head; None when it uses the base's."""
    notes: LabelNotes | None
    """What its files say of labels."""


def read_notes(content: Mapping[str, Any]) -> LabelNotes:
    """Read what a configuration says of labels.

    Fields: `id2label` (column -> name), `problem_type` (transformers' words), `threshold` (a
    number) and `thresholds` (name or column -> number).

    Raises:
        StartupError: a field is not what it should be; all of them are listed.
    """
    problems: list[str] = []
    names = _read_names(content.get("id2label"), problems)
    kind = content.get("problem_type")
    if kind is not None and kind not in set(ProblemType):
        problems.append(f"problem_type is {kind!r}, expected one of {', '.join(ProblemType)}")
        kind = None
    threshold = content.get("threshold")
    if threshold is not None and not _is_probability(threshold):
        problems.append(f"threshold is {threshold!r}, expected a number from 0 to 1")
        threshold = None
    thresholds = _read_thresholds(content.get("thresholds"), names, problems)
    if problems:
        raise StartupError(problems)
    return LabelNotes(
        names=names,
        problem_type=None if kind is None else ProblemType(kind),
        thresholds=thresholds,
        default_threshold=threshold,
    )


def adapter_notes(config: Mapping[str, Any], folder: str | Path) -> LabelNotes | None:
    """Read what an adapter's files say of labels; None when they say nothing.

    Args:
        config: the content of `adapter_config.json`, which is asked first.
        folder: where the adapter lies; a remote one has no further file.

    Raises:
        StartupError: as `read_notes`, or the file cannot be read; the file is named.
    """
    notes = _named(config, "adapter_config.json")
    path = Path(folder) / LABEL_FILE
    if notes.is_empty and path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES:
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise StartupError([f"{LABEL_FILE} cannot be read: {error}"]) from error
        notes = _named(content if isinstance(content, dict) else {}, LABEL_FILE)
    return None if notes.is_empty else notes


def _named(content: Mapping[str, Any], name: str) -> LabelNotes:
    try:
        return read_notes(content)
    except StartupError as error:
        raise StartupError([f"{name}: {problem}" for problem in error.problems]) from error


def build_labels(num_labels: int, *notes: LabelNotes | None) -> LabelSet:
    """Name the columns of a head.

    Args:
        num_labels: columns there are.
        *notes: what is known, the strongest first; names count only where they are for exactly so
            many columns.

    Returns:
        Names from the first of the notes that has them all, else `LABEL_0` and on; the kind of
        problem and the thresholds from the first that says anything of them.
    """
    known = [note for note in notes if note is not None]
    columns = range(num_labels)
    names = next(
        (tuple(n.names[i] for i in columns) for n in known if sorted(n.names) == list(columns)),
        tuple(f"LABEL_{i}" for i in columns),
    )
    kind = next((n.problem_type for n in known if n.problem_type), ProblemType.SINGLE_LABEL)
    own = next((n.thresholds for n in known if n.thresholds), {})
    default = next(
        (n.default_threshold for n in known if n.default_threshold is not None), DEFAULT_THRESHOLD
    )
    return LabelSet(
        names=names,
        problem_type=kind,
        thresholds=tuple(own.get(i, default) for i in columns),
    )


def _read_names(value: object, problems: list[str]) -> dict[int, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        problems.append(f"id2label is a {type(value).__name__}, expected an object")
        return {}
    names: dict[int, str] = {}
    for key, name in value.items():
        if str(key).isdecimal() and isinstance(name, str | int):
            names[int(key)] = str(name)
        else:
            problems.append(f"id2label has {key!r}: {name!r}, expected a column and a name")
    return names


def _read_thresholds(
    value: object, names: Mapping[int, str], problems: list[str]
) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        problems.append(f"thresholds is a {type(value).__name__}, expected an object")
        return {}
    columns = {name: column for column, name in names.items()}
    found: dict[int, float] = {}
    for key, number in value.items():
        column = columns.get(str(key), int(key) if str(key).isdecimal() else None)
        if column is None or not _is_probability(number):
            problems.append(f"thresholds has {key!r}: {number!r}, expected a label and 0 to 1")
        else:
            found[column] = float(number)
    return found


def _is_probability(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
