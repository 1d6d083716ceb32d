"""Rank, alpha and scaling of each module, and the fold of the scaling into B.

Follows PEFT: ``alpha / r``, or ``alpha / sqrt(r)`` with rsLoRA; ``rank_pattern`` and
``alpha_pattern`` override r and alpha for the modules they match. Knows nothing of files.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from lora_weights.config import AdapterConfig

N = TypeVar("N", int, float)

MAX_PATTERN_QUANTIFIERS = 3
"""Unbounded quantifiers accepted in a pattern.

Patterns come with the adapter and are matched by a backtracking engine, so a hostile one could
hold up the process. The patterns PEFT's users write have one or two.
"""

MAX_EXPRESSIONS = 64
"""Patterns accepted in one table that are more than a plain path, for the same reason."""

_QUANTIFIED_GROUP = re.compile(r"(?<!\\)\)[*+{]")
_QUANTIFIER = re.compile(r"(?<!\\)(?:[*+]|\{\d*,\d*\})")
_PLAIN = re.compile(r"[\w.\-]+")


def pattern_fault(pattern: str) -> str | None:
    """Return what is wrong with a rank or alpha pattern, or None.

    Args:
        pattern: a module path, a tail of one, or a regular expression over one.
    """
    try:
        re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, OverflowError, RecursionError) as error:
        return f"not a regular expression ({error})"
    if _QUANTIFIED_GROUP.search(pattern):
        return "a regular expression that repeats a group, which can take unbounded time"
    if len(_QUANTIFIER.findall(pattern)) > MAX_PATTERN_QUANTIFIERS:
        return f"a regular expression with more than {MAX_PATTERN_QUANTIFIERS} quantifiers"
    return None


def is_plain_path(pattern: str) -> bool:
    """Return whether a pattern is a path, without anything special to regular expressions."""
    return _PLAIN.fullmatch(pattern) is not None


class PatternTable(Generic[N]):
    """The entries of ``rank_pattern`` or ``alpha_pattern``; the first that matches counts.

    A pattern matches when it equals the tail of a module path from a dot (or the start) on. Files
    with one plain path per module are common, so those are found by look-up. A dot in a path is
    still the wildcard it is in a regular expression: paths of one length and with the same dot
    positions share a table, in which a tail is looked up with dots put at those positions.
    """

    def __init__(self, patterns: Mapping[str, N]) -> None:
        self._plain: dict[int, dict[tuple[int, ...], dict[str, tuple[int, N]]]] = {}
        self._expressions: list[tuple[int, re.Pattern[str], N]] = []
        for order, (pattern, value) in enumerate(patterns.items()):
            if is_plain_path(pattern):
                dots = tuple(i for i, character in enumerate(pattern) if character == ".")
                tables = self._plain.setdefault(len(pattern), {})
                tables.setdefault(dots, {})[pattern] = (order, value)
            else:
                expression = re.compile(rf"(.*\.)?({pattern})$")
                self._expressions.append((order, expression, value))

    def lookup(self, module: str) -> N | None:
        """Return the value of the first pattern that matches a module path, or None."""
        found = min(self._plain_matches(module), default=None, key=lambda match: match[0])
        for order, expression, value in self._expressions:
            if found is not None and found[0] < order:
                break
            if expression.match(module):
                return value
        return None if found is None else found[1]

    def _plain_matches(self, module: str) -> Iterator[tuple[int, N]]:
        """Yield (order, value) of the plain paths that match."""
        if not self._plain:
            return
        starts = [0, *(i + 1 for i, character in enumerate(module) if character == ".")]
        for start in starts:
            tail = module[start:]
            for dots, table in self._plain.get(len(tail), {}).items():
                match = table.get(_with_dots(tail, dots))
                if match is not None:
                    yield match


def _with_dots(text: str, positions: tuple[int, ...]) -> str:
    """Return the text with a dot at each of the positions."""
    if all(text[position] == "." for position in positions):
        return text
    characters = list(text)
    for position in positions:
        characters[position] = "."
    return "".join(characters)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleScaling:
    """Rank and scaling that hold for one module."""

    rank: int
    """Rank the configuration gives the module."""
    scaling: float
    """Factor of ``B A``: ``alpha / rank``, or ``alpha / sqrt(rank)`` with rsLoRA."""


class ScalingTable:
    """Rank and scaling of any module of one adapter. Patterns are compiled once."""

    def __init__(self, config: AdapterConfig) -> None:
        self._config = config
        self._ranks = PatternTable(config.rank_pattern)
        self._alphas = PatternTable(config.alpha_pattern)

    def resolve(self, module: str) -> ModuleScaling:
        """Return rank and scaling of a module.

        Args:
            module: its path as the checkpoint spells it, without PEFT's prefix.
        """
        rank = self._ranks.lookup(module)
        rank = self._config.r if rank is None else rank
        alpha = self.alpha(module)
        if not rank:  # a method without pairs
            return ModuleScaling(rank=0, scaling=1.0)
        divisor = math.sqrt(rank) if self._config.use_rslora else rank
        return ModuleScaling(rank=rank, scaling=alpha / divisor)

    def alpha(self, module: str) -> float:
        """Return the alpha of a module, named as for `resolve`."""
        alpha = self._alphas.lookup(module)
        return self._config.lora_alpha if alpha is None else alpha


def fold_scaling_(lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Multiply B by the scaling in float32 and round once to B's own dtype, in place.

    Args:
        lora_b: B, `[O, r]`; written.
        scaling: the factor of ``B A``.

    Returns:
        `lora_b`.
    """
    if scaling == 1.0:
        return lora_b
    # For narrow types torch multiplies by a number in float32 and rounds once, which is what is
    # wanted; a test compares all their values with the three steps written out.
    return lora_b.mul_(scaling)
