"""Typed fields out of an unchecked JSON object, with every wrong one noted.

Knows which form a field has, not what it means.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeGuard

from lora_weights.errors import Problem, ProblemCode
from lora_weights.fields import CONFIG_FILE, short
from lora_weights.scaling import MAX_EXPRESSIONS, is_plain_path, pattern_fault

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PLAIN_INITIALISATIONS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
"""Values of ``init_lora_weights`` under which PEFT loads an adapter onto an unchanged base."""


def _is_rank(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


class FieldReader:
    """Reads typed fields and collects what has the wrong type."""

    def __init__(self, data: Mapping[str, object]) -> None:
        self._data = data
        self.problems: list[Problem] = []

    def _refuse(self, name: str, value: object, expected: str) -> None:
        self.problems.append(
            Problem(
                code=ProblemCode.INVALID_FIELD,
                tensor=f"{CONFIG_FILE} {name}",
                found=short(value),
                expected=expected,
            )
        )

    def rank(self, name: str) -> int | None:
        """Return a positive integer, or None after noting a wrong one."""
        value = self._data.get(name)
        if _is_rank(value):
            return value
        if name in self._data:
            self._refuse(name, value, "an integer of at least 1")
        return None

    def number(self, name: str) -> float | None:
        """Return a finite number, or None after noting a wrong one."""
        value = self._data.get(name)
        if _is_number(value):
            return float(value)
        if name in self._data:
            self._refuse(name, value, "a finite number")
        return None

    def flag(self, name: str) -> bool:
        """Return a boolean; absent and null are false."""
        value = self._data.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        self._refuse(name, value, "true or false")
        return False

    def text(self, name: str) -> str | None:
        """Return text or None. Fields read this way are only shown, so nothing is refused."""
        value = self._data.get(name)
        return value if isinstance(value, str) else None

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of names without repetitions; null is empty."""
        value = self._data.get(name)
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(dict.fromkeys(value))
        self._refuse(name, value, "a list of names or null")
        return ()

    def targets(self, name: str) -> tuple[str, ...] | str | None:
        """Return a list of names, a regular expression, or None."""
        value = self._data.get(name)
        return value if value is None or isinstance(value, str) else self.names(name)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return one of several words; absent is the first."""
        value = self._data.get(name, choices[0])
        if isinstance(value, str) and value in choices:
            return value
        self._refuse(name, value, f"one of {', '.join(choices)}")
        return choices[0]

    def initialisation(self, name: str) -> bool | str | None:
        """Return how A and B were initialised; note a value that changed the base weight."""
        value = self._data.get(name, True)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in PLAIN_INITIALISATIONS:
            return value
        self.problems.append(
            Problem(
                code=ProblemCode.UNSUPPORTED_FIELD,
                tensor=f"{CONFIG_FILE} {name}",
                found=short(value),
                expected="true, false, gaussian, eva, orthogonal, mica or lora_ga; others change "
                "the base weight, so convert the adapter to plain LoRA when saving it",
            )
        )
        return None

    def tokens(self, name: str) -> tuple[int, ...]:
        """Return a list of token ids; null is empty."""
        value = self._data.get(name)
        if value is None:
            return ()
        if isinstance(value, list) and all(type(item) is int for item in value):
            return tuple(value)
        self._refuse(name, value, "a list of token ids or null")
        return ()

    def rank_pattern(self, name: str) -> dict[str, int]:
        """Return pattern -> rank, in the order of the file; null is empty."""
        ranks = {}
        for pattern, value in self._patterns(name):
            if _is_rank(value):
                ranks[pattern] = value
            else:
                self._refuse(f"{name}[{pattern!r}]", value, "an integer of at least 1")
        return ranks

    def alpha_pattern(self, name: str) -> dict[str, float]:
        """Return pattern -> alpha, in the order of the file; null is empty."""
        alphas = {}
        for pattern, value in self._patterns(name):
            if _is_number(value):
                alphas[pattern] = float(value)
            else:
                self._refuse(f"{name}[{pattern!r}]", value, "a finite number")
        return alphas

    def _patterns(self, name: str) -> Iterator[tuple[str, object]]:
        """Yield the entries whose pattern can be matched; note the others."""
        value = self._data.get(name)
        if value is None:
            return
        if not isinstance(value, dict):
            self._refuse(name, value, "an object or null")
            return
        count = sum(not is_plain_path(pattern) for pattern in value)
        if count > MAX_EXPRESSIONS:
            found = f"{count} regular expressions"
            self._refuse(name, found, f"at most {MAX_EXPRESSIONS} besides plain module paths")
            return
        for pattern, entry in value.items():
            fault = pattern_fault(pattern)
            if fault is None:
                yield pattern, entry
            else:
                self._refuse(name, pattern, f"a module path or a simple pattern; this is {fault}")
