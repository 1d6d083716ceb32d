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

MAX_RANK = 2**31 - 1
"""Largest rank a configuration may name; beyond it, arithmetic with floats would fail."""

MAX_TOKEN_ID = 2**31 - 1
"""Largest token id accepted: what engines and tokenizers can hold."""

PLAIN_INITIALISATIONS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
"""Values of ``init_lora_weights`` under which PEFT loads an adapter onto an unchanged base."""


_CONVERTIBLE = ("pissa", "olora", "corda")
"""Initialisations that PEFT can undo when an adapter is saved."""


def _initialisation_advice(value: object) -> str:
    """Return why an initialisation is refused, and what to do about it."""
    name = value.lower() if isinstance(value, str) else ""
    if name.startswith(_CONVERTIBLE):
        return (
            f"{value} moves a part of the base weight into A and B, so it fits that changed base "
            "only: save it again with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...), which writes a plain "
            "LoRA for the unchanged base"
        )
    if name == "loftq":
        return (
            "LoftQ fits A and B to the error of a quantised base, and PEFT offers no conversion: "
            "merge the adapter into that base, or train it again on the base served here"
        )
    return "an unknown one may change the base weight"


def _is_rank(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_RANK


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _is_tokens(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(item) is int and abs(item) <= MAX_TOKEN_ID for item in value
    )


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

    def flag(self, name: str, *, absent: bool = False) -> bool:
        """Return a boolean; null is false."""
        value = self._data.get(name, absent)
        if value is None or isinstance(value, bool):
            return bool(value)
        self._refuse(name, value, "true or false")
        return absent

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
        """Return one of several words; absent and null are the first."""
        value = self._data.get(name)
        if value is None:
            return choices[0]
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
                expected=f"true, false, {', '.join(sorted(PLAIN_INITIALISATIONS))}; "
                f"{_initialisation_advice(value)}",
            )
        )
        return None

    def rows(self, name: str) -> Mapping[str, tuple[int, ...]] | tuple[int, ...] | None:
        """Return token ids, or module name -> token ids; null is None."""
        value = self._data.get(name)
        if not isinstance(value, dict):
            return None if value is None else self.tokens(name)
        if all(_is_tokens(ids) for ids in value.values()):
            return {module: tuple(ids) for module, ids in value.items()}
        self._refuse(name, value, "a list of token ids, or module names with such lists")
        return None

    def tokens(self, name: str) -> tuple[int, ...]:
        """Return a list of token ids; null is empty."""
        value = self._data.get(name)
        if value is None:
            return ()
        if _is_tokens(value):
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
