"""What a fused experts module gets: stacked pairs in one canonical form, and the module's size.

Shapes: `X` experts, `r` rank, `H` hidden size, `F` intermediate size, `I` in, `O` out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Size of one fused experts module of the base model."""

    num_experts: int
    """`X`."""
    hidden_size: int
    """`H`."""
    intermediate_size: int
    """`F`, rows of one of gate and up."""
    is_gated: bool = True
    """Whether there is a gate (w1) beside the up projection (w3)."""
    is_interleaved: bool = False
    """Whether the base keeps gate in the even rows and up in the odd ones, not in halves."""
    is_transposed: bool = False
    """Whether the base stores its parameters as `[X, I, O]` (gpt-oss), not as `[X, O, I]`. PEFT
    asks the same question before it gives A the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertPair:
    """A and B of one projection of all experts. The scaling is in B."""

    lora_a: torch.Tensor
    """`[X, r, I]`, or `[1, r, I]` when all experts share it."""
    lora_b: torch.Tensor
    """`[X, O, r]`, or `[1, O, r]` when all experts share it."""

    @property
    def rank(self) -> int:
        """The pair's own width."""
        return self.lora_a.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.lora_a.nbytes + self.lora_b.nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertPart:
    """The pairs of one fused experts module."""

    w1: ExpertPair | None = None
    """Gate, `H -> F`."""
    w2: ExpertPair | None = None
    """Down, `F -> H`."""
    w3: ExpertPair | None = None
    """Up, `H -> F`; None for experts without a gate, whose one projection is w1. It may share
    its `lora_a` with w1."""

    def map_pairs(self, change: Callable[[str, ExpertPair], ExpertPair]) -> ExpertPart:
        """Return a part with every pair changed; an A that w1 and w3 share stays one tensor.

        Args:
            change: takes the name (w1, w2, w3) and the pair.
        """
        pairs = {
            name: change(name, pair)
            for name, pair in (("w1", self.w1), ("w2", self.w2), ("w3", self.w3))
            if pair is not None
        }
        if self.has_shared_a:
            pairs["w3"] = ExpertPair(lora_a=pairs["w1"].lora_a, lora_b=pairs["w3"].lora_b)
        return ExpertPart(**pairs)

    @property
    def has_shared_a(self) -> bool:
        """Whether w1 and w3 have one and the same A, as 3D files give them."""
        return self.w1 is not None and self.w3 is not None and self.w1.lora_a is self.w3.lora_a

    @property
    def rank(self) -> int:
        """Largest rank of any pair; 0 when there is none."""
        return max((pair.rank for pair in (self.w1, self.w2, self.w3) if pair), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, a shared factor counted once."""
        pairs = [pair for pair in (self.w1, self.w2, self.w3) if pair is not None]
        tensors = {id(t): t.nbytes for pair in pairs for t in (pair.lora_a, pair.lora_b)}
        return sum(tensors.values())
