"""Rank, alpha and scaling of each module, and the fold of the scaling into B.

Follows PEFT: ``alpha / r``, or ``alpha / sqrt(r)`` with rsLoRA; ``rank_pattern`` and
``alpha_pattern`` override r and alpha for the modules they match. Knows nothing of files.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lora_weights.config import AdapterConfig

N = TypeVar("N", int, float)

MAX_PATTERN_QUANTIFIERS = 3
"""Unbounded quantifiers accepted in a pattern.

Patterns come with the adapter and are matched by a backtracking engine, so a hostile one could
hold up the process. The patterns PEFT's users write have one or two.
"""

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


class PatternTable(Generic[N]):
    """The entries of ``rank_pattern`` or ``alpha_pattern``, in the order of the file."""

    def __init__(self, patterns: Mapping[str, N]) -> None:
        self._entries: list[tuple[str, re.Pattern[str], N]] = [
            (_literal_tail(pattern), re.compile(rf"(.*\.)?({pattern})$"), value)
            for pattern, value in patterns.items()
        ]

    def lookup(self, module: str) -> N | None:
        """Return the value of the first pattern that matches a module path, or None.

        A pattern matches when it equals the tail of the path from a dot (or the start) on.
        """
        for tail, expression, value in self._entries:
            # Most patterns are plain paths: their last part rejects nearly all modules cheaply.
            if module.endswith(tail) and expression.match(module):
                return value
        return None


def _literal_tail(pattern: str) -> str:
    """Return text that every match ends with; empty when nothing is certain."""
    return pattern.rpartition(".")[2] if _PLAIN.fullmatch(pattern) else ""


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
        alpha = self._alphas.lookup(module)
        rank = self._config.r if rank is None else rank
        alpha = self._config.lora_alpha if alpha is None else alpha
        divisor = math.sqrt(rank) if self._config.use_rslora else rank
        return ModuleScaling(rank=rank, scaling=alpha / divisor)


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
    if lora_b.dtype == torch.float32:
        return lora_b.mul_(scaling)
    return lora_b.copy_(lora_b.to(torch.float32).mul_(scaling))
