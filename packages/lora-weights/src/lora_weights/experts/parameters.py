"""Pairs on 3D parameters: which parameter each belongs to, and which dimension is its input.

PEFT names such pairs by nesting alone, in an order that depends on the model, so shapes decide.
Its wrapper gives A the first or the second dimension of the parameter, by release and base:

    up to 0.18   A over dimension 1, B over dimension 2, always
    0.19.0       exchanged for a base that says `is_transposed`
    from 0.19.1  exchanged for a base that does not

(``ParamWrapper._get_in_out_features``, ``update_layer`` and ``get_delta_weight`` in
``peft/tuners/lora/layer.py`` of these releases.) Where dimension 1 is the output the pair is that
of the transposed update. Shapes tell, except where they are square.

Shapes: `X` experts, `r` rank, `H` hidden size, `F` intermediate size, `I` in, `O` out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

from lora_weights.experts.names import PROJECTIONS, Projection, projection_sizes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lora_weights.experts.parts import ExpertShape

_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(.*)")
_PLAIN_RELEASE = re.compile(r"(?:|\.?rc\d+|\.?post\d+)")
_FIRST_WITH_EXCHANGE = (0, 19, 0)
_FIRST_WITHOUT_FAULT = (0, 19, 1)
_LAST_BEFORE_DEVELOPMENT = (0, 18, 1)
_FIRST_AFTER_DEVELOPMENT = (0, 19, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """One way to explain the stored pairs of an experts module."""

    projections: tuple[Projection, ...]
    """What each pair is, in the order given."""
    is_reversed: bool
    """Whether A runs over the outputs and B over the inputs."""


def is_reversed_by(version: str | None, *, is_transposed: bool) -> bool | None:
    """Return whether a release gives A the outputs of a parameter; None when it cannot be told.

    Args:
        version: ``peft_version`` of the file, which releases before 0.18 do not write.
        is_transposed: whether the base stores `[X, I, O]` and says so.
    """
    match = _VERSION.fullmatch(version or "")
    if match is None:
        return None
    release = (int(match[1]), int(match[2]), int(match[3] or 0))
    if not _PLAIN_RELEASE.fullmatch(match[4]):
        # Development builds from 0.18.1 to 0.19.1 have the rule of either side.
        if release >= _FIRST_AFTER_DEVELOPMENT:
            return False
        return None if release >= _LAST_BEFORE_DEVELOPMENT else not is_transposed
    if release >= _FIRST_WITHOUT_FAULT:
        return False
    if release >= _FIRST_WITH_EXCHANGE:
        return True
    return not is_transposed


def parameter_sizes(shape: ExpertShape) -> dict[Projection, tuple[int, int]]:
    """Return (in, out) of the parameters that an experts module has."""
    first = Projection.W13 if shape.is_gated else Projection.W1
    sizes = projection_sizes(shape)
    return {first: sizes[first], Projection.W2: sizes[Projection.W2]}


def find_placings(
    sizes: Sequence[tuple[int, int]],
    shape: ExpertShape,
    *,
    parameters: Iterable[str] = (),
    version: str | None = None,
) -> list[Placing]:
    """Return the ways to explain pairs: one when it is clear, none, or several.

    Args:
        sizes: (columns of A, rows of B) of each pair.
        shape: the base's experts.
        parameters: names of the parameters that the configuration lists; they count where there
            are as many as pairs.
        version: ``peft_version``; it counts where the shapes leave a choice.
    """
    table = parameter_sizes(shape)
    found = [
        Placing(projections=projections, is_reversed=is_reversed)
        for is_reversed in (False, True)
        for projections in permutations(table, len(sizes))
        if _fits(sizes, [table[name] for name in projections], is_reversed=is_reversed)
    ]
    listed = declared_projections(parameters, is_gated=shape.is_gated)
    if len(listed) == len(sizes):
        found = _narrow(found, [p for p in found if set(p.projections) == listed])
    known = is_reversed_by(version, is_transposed=shape.is_transposed)
    return _narrow(found, [p for p in found if p.is_reversed is known])


def _fits(
    sizes: Sequence[tuple[int, int]], wanted: Sequence[tuple[int, int]], *, is_reversed: bool
) -> bool:
    return all(
        size == (want[::-1] if is_reversed else want)
        for size, want in zip(sizes, wanted, strict=True)
    )


def _narrow(found: list[Placing], fewer: list[Placing]) -> list[Placing]:
    """Return the fewer ones, unless nothing is left or nothing was to be decided."""
    return fewer if len(found) > 1 and fewer else found


def declared_projections(parameters: Iterable[str], *, is_gated: bool) -> set[Projection]:
    """Return the projections that names of parameters stand for; unknown names are left out."""
    found = {PROJECTIONS[name] for name in parameters if name in PROJECTIONS}
    if not is_gated and Projection.W3 in found:
        found = (found - {Projection.W3}) | {Projection.W1}
    return found


def parameter_name(projection: Projection, *, is_gated: bool) -> str:
    """Return the name of a parameter with which PEFT matches its rank and alpha patterns."""
    if projection is Projection.W2:
        return "down_proj"
    return "gate_up_proj" if is_gated else "up_proj"
