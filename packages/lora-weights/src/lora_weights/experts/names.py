"""Which experts a module path of a checkpoint names, and which of their projections.

    <experts>.N.gate_proj     one expert's module                       (2D)
    <experts>.gate_up_proj    one projection of all experts, stacked    (3D, also ``w1|w2|w3``)
    <experts>.base_layer      one parameter of the experts module, which PEFT names by nesting only

Shapes: `H` hidden size, `F` intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lora_weights.experts.parts import ExpertShape

EXPERTS = "experts"
"""Last name of a module that holds the routed experts."""

WRAPPER = "base_layer"
"""What PEFT calls the inner one of two nested wrappers."""


class Projection(StrEnum):
    """The projections of an expert."""

    W1 = "w1"
    """Gate; of experts without a gate the one projection before the activation."""
    W2 = "w2"
    """Down."""
    W3 = "w3"
    """Up."""
    W13 = "w13"
    """Gate and up in one matrix."""


PROJECTIONS: Mapping[str, Projection] = MappingProxyType(
    {
        "gate_proj": Projection.W1,
        "down_proj": Projection.W2,
        "up_proj": Projection.W3,
        "gate_up_proj": Projection.W13,
        "w1": Projection.W1,
        "w2": Projection.W2,
        "w3": Projection.W3,
        "w13": Projection.W13,
    }
)
"""Name of a module or parameter -> projection, for experts with a gate."""

UNGATED_PROJECTIONS: Mapping[str, Projection] = MappingProxyType(
    {
        "up_proj": Projection.W1,
        "down_proj": Projection.W2,
        "w1": Projection.W1,
        "w2": Projection.W2,
    }
)
"""Name of a module or parameter -> projection, for experts without a gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertName:
    """One module path below an experts module, taken apart."""

    experts: str
    """Path of the experts module."""
    expert: int | None = None
    """Index of the one expert, for a 2D file."""
    name: str = ""
    """Name of the projection, or the nesting (``base_layer``, or nothing) of a parameter."""

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter of the experts module, which only its nesting names."""
        return self.name not in PROJECTIONS


def parse_expert(module: str) -> ExpertName | None:
    """Take the path of a module apart that belongs to routed experts.

    Args:
        module: path without PEFT's prefix.

    Returns:
        What it names, or None for every other module, those of shared experts among them.
    """
    segments = module.split(".")
    if EXPERTS not in segments:
        return None
    position = len(segments) - 1 - segments[::-1].index(EXPERTS)
    experts, rest = ".".join(segments[: position + 1]), segments[position + 1 :]
    if all(segment == WRAPPER for segment in rest):
        return ExpertName(experts=experts, name=".".join(rest))
    if len(rest) == 1 and rest[0] in PROJECTIONS:
        return ExpertName(experts=experts, name=rest[0])
    if len(rest) == 2 and rest[0].isdecimal() and rest[1] in PROJECTIONS:  # noqa: PLR2004
        return ExpertName(experts=experts, expert=int(rest[0]), name=rest[1])
    return None


def projections_of(shape: ExpertShape) -> Mapping[str, Projection]:
    """Return the names of projections that the experts of a base can have."""
    return PROJECTIONS if shape.is_gated else UNGATED_PROJECTIONS


def projection_sizes(shape: ExpertShape) -> dict[Projection, tuple[int, int]]:
    """Return (in, out) of every projection that the experts of a base can have."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    sizes = {Projection.W1: (hidden, inner), Projection.W2: (inner, hidden)}
    if shape.is_gated:
        sizes |= {Projection.W3: (hidden, inner), Projection.W13: (hidden, 2 * inner)}
    return sizes
