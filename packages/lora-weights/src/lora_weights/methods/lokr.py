"""LoKr: the Kronecker product of two matrices, each stored whole or as two factors.

    y' = W x + b + (alpha / r) (w1 (x) w2) x,    w1 = w1 or w1_a w1_b,    w2 = w2 or w2_a w2_b

(``peft/tuners/lokr/layer.py``, ``get_delta_weight``; the scaling is there whether or not anything
is factored.) ``(L1 R1) (x) (L2 R2) = (L1 (x) L2) (R1 (x) R2)``, so the pair is the Kronecker
products of the left and of the right factors, and its rank the product of theirs. A whole matrix
is itself and the identity on its shorter side; factors wider than that are multiplied out.

Shapes: w1 `[a, c]`, w2 `[b, d]`, `O = a*b`, `I = c*d`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from lora_weights.errors import Problem, ProblemCode
from lora_weights.fields import CONFIG_FILE
from lora_weights.modules import LoraPair
from lora_weights.names import Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from lora_weights.tensor_format import TensorEntry

SIDES = (
    (Part.LOKR_W1, Part.LOKR_W1_A, Part.LOKR_W1_B),
    (Part.LOKR_W2, Part.LOKR_W2_A, Part.LOKR_W2_B),
)
"""For w1 and w2: the part that holds it whole, and the two that hold its factors."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KroneckerFactor:
    """One of the two matrices: whole, or as two factors."""

    left: torch.Tensor
    """The matrix, `[m, n]`, or its left factor, `[m, r]`."""
    right: torch.Tensor | None = None
    """The right factor, `[r, n]`; None for a whole matrix."""

    @property
    def rows(self) -> int:
        """`m`."""
        return self.left.shape[0]

    @property
    def columns(self) -> int:
        """`n`."""
        return (self.left if self.right is None else self.right).shape[1]

    @property
    def rank(self) -> int:
        """Inner width of the narrowest exact factorisation that the form gives."""
        stored = [] if self.right is None else [self.right.shape[0]]
        return min(self.rows, self.columns, *stored)

    def split(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the left `[m, rank]` and the right `[rank, n]` factor, float32."""
        left = self.left.float()
        if self.right is not None:
            right = self.right.float()
            if right.shape[0] == self.rank:
                return left, right
            left = left @ right
        identity = torch.eye(self.rank)
        return (identity, left) if self.rows <= self.columns else (left, identity)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LokrFactors:
    """The two matrices of one module."""

    w1: KroneckerFactor
    """`[a, c]`, the outer matrix."""
    w2: KroneckerFactor
    """`[b, d]`, the inner matrix."""
    stored_rank: int
    """`r` of the module by the configuration."""
    alpha: float
    """Alpha of the module; the scaling is ``alpha / r``."""
    dtype: torch.dtype
    """Type of the pair."""

    @property
    def out_features(self) -> int:
        """`O`."""
        return self.w1.rows * self.w2.rows

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> Mapping[Part, torch.Tensor]:
        """Return the stored matrices, by part."""
        found = {}
        for factor, (whole, left, right) in zip((self.w1, self.w2), SIDES, strict=True):
            if factor.right is None:
                found[whole] = factor.left
            else:
                found |= {left: factor.left, right: factor.right}
        return MappingProxyType(found)

    def rank(self, in_features: int | None = None) -> int:
        """Return the product of the two ranks."""
        del in_features
        return self.w1.rank * self.w2.rank

    def fits(self, in_features: int) -> bool:
        """Return whether `I` is that of the factors."""
        return in_features == self.w1.columns * self.w2.columns

    def to_pair(self, in_features: int) -> LoraPair:
        """Return the exact pair."""
        assert self.fits(in_features)
        (left1, right1), (left2, right2) = self.w1.split(), self.w2.split()
        lora_b = torch.kron(left1, left2) * (self.alpha / self.stored_rank)
        lora_a = torch.kron(right1, right2)
        return LoraPair(lora_a=lora_a.to(self.dtype), lora_b=lora_b.to(self.dtype))


def check_factors(module: str, parts: Mapping[Part, TensorEntry], rank: int) -> Iterator[Problem]:
    """Yield what is wrong with the tensors of one module.

    Args:
        module: module path.
        parts: what the file holds of it.
        rank: the rank that the configuration gives the module.
    """
    for whole, left, right in SIDES:
        found = {whole, left, right} & parts.keys()
        if found == {whole}:
            shape = parts[whole].shape
            if len(shape) != 2 or not all(shape):  # noqa: PLR2004
                yield _problem(module, whole, str(list(shape)), "a matrix")
        elif found == {left, right}:
            for part, axis, form in ((left, 1, f"[m, {rank}]"), (right, 0, f"[{rank}, n]")):
                shape = parts[part].shape
                if len(shape) != 2 or shape[axis] != rank or not shape[1 - axis]:  # noqa: PLR2004
                    expected = f"{form} (rank {rank} by {CONFIG_FILE})"
                    yield _problem(module, part, str(list(shape)), expected)
        else:
            names = " and ".join(sorted(found)) or "nothing"
            yield Problem(
                code=ProblemCode.INCOMPLETE_PAIR,
                module=module,
                tensor=whole,
                found=f"there as {names}",
                expected=f"{whole}, or {left} with {right}",
            )


def _problem(module: str, part: Part, found: str, expected: str) -> Problem:
    return Problem(
        code=ProblemCode.SHAPE_MISMATCH, module=module, tensor=part, found=found, expected=expected
    )


def build_factor(tensors: Mapping[Part, torch.Tensor], side: int) -> KroneckerFactor:
    """Return one of the two matrices out of a module's tensors.

    Args:
        tensors: all tensors of the module, checked.
        side: 0 for w1, 1 for w2.
    """
    whole, left, right = SIDES[side]
    if whole in tensors:
        return KroneckerFactor(left=tensors[whole])
    return KroneckerFactor(left=tensors[left], right=tensors[right])
