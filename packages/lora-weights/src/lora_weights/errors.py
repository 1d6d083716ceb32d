"""Errors of this package, and the problems they carry.

    AdapterError(Exception)
        AdapterNotFoundError(FileNotFoundError)
        InvalidAdapterError(ValueError)
        SourceError(OSError)
        UnsafeFormatError(ValueError)

A caller's mistake in an adapter is a ``Problem``; validation collects all of them and raises once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_LISTED_PROBLEMS = 50
"""Problems written out in an error's text; all of them are in its ``problems``."""


class ProblemCode(StrEnum):
    """What kind of problem it is, for callers that branch or count."""

    AMBIGUOUS_MODULE = "ambiguous_module"
    BASE_COPY_DIFFERS = "base_copy_differs"
    CONFIG_UNREADABLE = "config_unreadable"
    DUPLICATE_MODULE = "duplicate_module"
    DUPLICATE_TENSOR = "duplicate_tensor"
    FOREIGN_FORMAT = "foreign_format"
    INCOMPLETE_PAIR = "incomplete_pair"
    INVALID_FIELD = "invalid_field"
    KIND_MISMATCH = "kind_mismatch"
    MISSING_FIELD = "missing_field"
    MISSING_WEIGHTS = "missing_weights"
    MIXED_NAMES = "mixed_names"
    NEEDS_BASE = "needs_base"
    NESTED_ADAPTER = "nested_adapter"
    NOT_FINITE = "not_finite"
    NOT_FOUND = "not_found"
    NOT_PEFT = "not_peft"
    NO_EFFECT = "no_effect"
    RANK_TOO_LARGE = "rank_too_large"
    SHAPE_MISMATCH = "shape_mismatch"
    SHARDED = "sharded"
    UNKNOWN_FIELD = "unknown_field"
    UNKNOWN_MODULE = "unknown_module"
    UNREADABLE = "unreadable"
    UNSAFE_FORMAT = "unsafe_format"
    UNSUPPORTED_DTYPE = "unsupported_dtype"
    UNSUPPORTED_FIELD = "unsupported_field"
    UNSUPPORTED_TENSOR = "unsupported_tensor"
    UNSUPPORTED_TYPE = "unsupported_type"
    WEIGHTS_UNREADABLE = "weights_unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with an adapter: where, found, expected."""

    code: ProblemCode
    """Kind of the problem."""
    module: str = ""
    """Module path in the base model, or empty when the problem is not about one module."""
    tensor: str = ""
    """Tensor key, part of a pair, field or file."""
    found: str = ""
    """What is there."""
    expected: str = ""
    """What would have been right."""

    def __str__(self) -> str:
        """Return "where is found, expected expected"."""
        where = " ".join(part for part in (self.module, self.tensor) if part)
        text = f"{where or 'the adapter'} is {self.found}"
        return f"{text}, expected {self.expected}" if self.expected else text


class AdapterError(Exception):
    """Base of everything this package raises on purpose."""


class AdapterNotFoundError(AdapterError, FileNotFoundError):
    """There is no adapter at the source: no folder, or no configuration in it."""

    def __init__(self, *, source: str, reason: str) -> None:
        self.source = source
        """The source as the caller gave it."""
        self.reason = reason
        """What was looked for and what was found instead."""
        super().__init__(f"no adapter at {source!r}: {reason}")


class SourceError(AdapterError, OSError):
    """The source cannot be read at all: an unknown scheme, a refused permission, a failing disk."""

    def __init__(self, *, source: str, reason: str) -> None:
        self.source = source
        """The source as the caller gave it."""
        self.reason = reason
        """What failed; the original error, where there is one, is the cause."""
        super().__init__(f"cannot read {source!r}: {reason}")


class UnsafeFormatError(AdapterError, ValueError):
    """The weights exist only in a pickle file, and the caller did not allow pickle."""

    def __init__(self, *, source: str, file_name: str) -> None:
        self.source = source
        """The source as the caller gave it."""
        self.file_name = file_name
        """The pickle file found."""
        super().__init__(
            f"{source!r} holds its weights only in {file_name}, a pickle file; "
            "save them as adapter_model.safetensors, or allow pickle for a source you trust"
        )


class InvalidAdapterError(AdapterError, ValueError):
    """The adapter was found and cannot be used. Holds every problem, not the first one."""

    def __init__(self, problems: Iterable[Problem], *, source: str = "") -> None:
        self.problems = tuple(problems)
        """All problems found, in the order configuration, files, tensors, modules."""
        self.source = source
        """Where the adapter came from; empty for one built in memory."""
        super().__init__(_problems_text(self.problems, source))


def _problems_text(problems: tuple[Problem, ...], source: str) -> str:
    """Return one line for one problem, a list for several."""
    head = f"adapter {source!r}: " if source else ""
    if len(problems) == 1:
        return f"{head}{problems[0]}"
    lines = [f"{head}{len(problems)} problems"]
    lines += [f"  {problem}" for problem in problems[:MAX_LISTED_PROBLEMS]]
    if len(problems) > MAX_LISTED_PROBLEMS:
        lines.append(f"  and {len(problems) - MAX_LISTED_PROBLEMS} more")
    return "\n".join(lines)
