"""The expert tensors of a file that one module path does not explain, as they were read.

Which parameter a pair belongs to, and which of its dimensions is the input, only the base's sizes
tell; so they stay as they are until the adapter is bound. Knows no base model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from lora_weights.scaling import ModuleScaling

PARAMETERS = ("gate_up_proj", "down_proj", "up_proj")
"""Names of the parameters that a pair known by its nesting can belong to."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredPair:
    """A and B as stored: nothing folded, nothing moved."""

    lora_a: torch.Tensor
    """`[X*r, I]` of a parameter, `[X or 1, r, I]` of a stacked projection."""
    lora_b: torch.Tensor
    """`[O, r*X]` of a parameter, `[X or 1, O, r]` of a stacked projection."""
    scalings: Mapping[str, ModuleScaling]
    """Rank and scaling by the name of the parameter it may turn out to be."""

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.lora_a.nbytes + self.lora_b.nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredExperts:
    """All stacked pairs of one experts module."""

    pairs: Mapping[str, StoredPair] = field(repr=False)
    """Name as in `ExpertName.name` -> pair."""
    dtype: torch.dtype | None = None
    """Type to hold the factors in; None keeps each one's own (float64 becomes float32)."""
    peft_version: str | None = None
    """The PEFT release that wrote the file, where it says so."""
    parameters: tuple[str, ...] = ()
    """Last names of the parameters that the configuration lists (``target_parameters``)."""
    local: range | None = None
    """The experts that were read of stacked projections; None is all. Pairs on parameters are
    always whole."""

    @property
    def rank(self) -> int:
        """Largest rank that the configuration gives a pair; 0 when there is none."""
        scalings = [scaling for pair in self.pairs.values() for scaling in pair.scalings.values()]
        return max((scaling.rank for scaling in scalings), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(pair.nbytes for pair in self.pairs.values())
