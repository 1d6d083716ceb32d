"""What one module gets from an adapter: a pair, and beside it biases, gains or a full module.

As stored, with the scaling folded in where it is linear; `bound` holds what a served base makes of
it. Shapes: `r` rank of the adapter, `I` in, `O` out, `V` vocabulary, `D` embedding width.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from lora_weights.experts.stored import StoredExperts
    from lora_weights.methods.factors import Factors


class ModuleKind(StrEnum):
    """Kinds of modules a pair can belong to."""

    LINEAR = "linear"
    EMBEDDING = "embedding"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleShape:
    """Size and kind of one module of the base model."""

    in_features: int
    """`I` of a linear module, `V` of an embedding."""
    out_features: int
    """`O` of a linear module, `D` of an embedding."""
    kind: ModuleKind = ModuleKind.LINEAR
    """Linear (Conv1D too) or embedding."""
    is_transposed: bool = False
    """Whether the base stores the weight as `[I, O]` (Conv1D), and so whole replacements of it."""
    max_out_features: int | None = None
    """Most rows a whole replacement may have, for a head whose labels an adapter may choose; None
    for any other module, whose replacement has `O` rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraPair:
    """A and B of one module. The scaling is in B: ``y = W x + B (A x)``."""

    lora_a: torch.Tensor
    """`[r, I]`; `[r, V]` for an embedding."""
    lora_b: torch.Tensor
    """`[O, r]`, scaling folded in; `[D, r]` for an embedding."""
    is_embedding: bool = False
    """Whether the pair was stored as the pair of an embedding."""

    @property
    def rank(self) -> int:
        """The pair's own width."""
        return self.lora_a.shape[0]

    @property
    def in_features(self) -> int:
        """`I`, or `V` for an embedding."""
        return self.lora_a.shape[1]

    @property
    def out_features(self) -> int:
        """`O`, or `D` for an embedding."""
        return self.lora_b.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.lora_a.nbytes + self.lora_b.nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FullModule:
    """A whole replacement for one module (PEFT's ``modules_to_save``)."""

    weight: torch.Tensor
    """`[O, I]`, or `[V, D]` for an embedding."""
    bias: torch.Tensor | None = None
    """`[O]`, where the module has one."""

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRows:
    """New values for single rows of an embedding (PEFT's ``trainable_token_indices``)."""

    token_ids: torch.Tensor
    """`[n]`, int64, each once."""
    rows: torch.Tensor
    """`[n, D]`: the rows that replace the base's."""

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.token_ids.nbytes + self.rows.nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModulePart:
    """Everything one module gets from one adapter, as stored."""

    pair: LoraPair | None = None
    """The low-rank pair."""
    lora_bias: torch.Tensor | None = None
    """`[O]`, the bias of lora_B times the scaling; added."""
    bias: torch.Tensor | None = None
    """`[O]`, the trained bias of the base module; replaces the base's."""
    magnitude: torch.Tensor | None = None
    """`[O]`, DoRA's magnitude vector."""
    gain: torch.Tensor | None = None
    """`[O]`, factor of the module's output (IA3)."""
    factors: Factors | None = None
    """The update of VeRA, LoHa or LoKr, which becomes a pair when the part is bound."""
    full: FullModule | None = None
    """A whole replacement; then there is nothing else."""
    token_rows: TokenRows | None = None
    """Replaced rows of an embedding, or of the head tied to it."""
    experts: StoredExperts | None = None
    """Stacked pairs of an experts module; then there is nothing else."""

    @property
    def is_linear(self) -> bool:
        """Whether a scale on the part is a scale on what it adds to the base's output."""
        return self.magnitude is None and self.gain is None and self.full is None

    @property
    def rank(self) -> int:
        """Largest rank of anything low-rank; 0 when there is nothing."""
        ranks = [part.rank for part in (self.pair, self.experts) if part is not None]
        ranks += [] if self.factors is None else [self.factors.rank()]
        return max(ranks, default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        vectors = (self.lora_bias, self.bias, self.magnitude, self.gain)
        wholes = (self.pair, self.factors, self.full, self.token_rows, self.experts)
        return sum(part.nbytes for part in (*vectors, *wholes) if part is not None)
