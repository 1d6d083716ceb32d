"""What one module of a served base gets from one adapter, once both are known.

    y' = gain * (y + B A x) + bias,  with y the base module's own output
    y' = W x + b                     for a whole replacement

Shapes: `r` rank, `I` in, `O` out, `V` vocabulary, `D` embedding width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from lora_weights.experts import ExpertPart
    from lora_weights.modules import FullModule, LoraPair


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BaseTensors:
    """The base's own tensors of one module, for what depends on them."""

    weight: torch.Tensor
    """`[O, I]` (of a Conv1D transposed), or `[V, D]` for an embedding; read in chunks of rows.
    Modules that hold one and the same tensor are tied."""
    bias: torch.Tensor | None = None
    """`[O]`, where the module has one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundPart:
    """Everything one module of the base gets from one adapter."""

    pair: LoraPair | None = None
    """The low-rank pair, trained token rows included."""
    gain: torch.Tensor | None = None
    """`[O]`, float32; None is 1."""
    bias: torch.Tensor | None = None
    """`[O]`, float32, added last; None is 0."""
    full: FullModule | None = None
    """A whole replacement; then there is nothing else."""
    experts: ExpertPart | None = None
    """Pairs of a fused experts module; then there is nothing else."""

    @property
    def is_linear(self) -> bool:
        """Whether a scale on the part is a scale on what it adds to the base's output."""
        return self.gain is None and self.full is None

    @property
    def rank(self) -> int:
        """Rank of the pair or of the experts' pairs; 0 when there is none."""
        return max((part.rank for part in (self.pair, self.experts) if part), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = (self.pair, self.gain, self.bias, self.full, self.experts)
        return sum(part.nbytes for part in parts if part is not None)
