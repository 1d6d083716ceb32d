"""LoHa: the elementwise product of two low-rank updates.

    y' = W x + b + (alpha / r) ((w1_a w1_b) * (w2_a w2_b)) x

(``peft/tuners/loha/layer.py``, ``get_delta_weight``.) An elementwise product of ranks r and r has
rank r*r at most, with the exact factors (row-wise and column-wise Kronecker products)

    lora_b[o, i*r + j] = (alpha / r) w1_a[o, i] w2_a[o, j],
    lora_a[i*r + j, :] = w1_b[i, :] * w2_b[j, :]
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from lora_weights.errors import Problem, ProblemCode
from lora_weights.fields import CONFIG_FILE
from lora_weights.methods.factors import product_pair
from lora_weights.modules import LoraPair
from lora_weights.names import Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from lora_weights.tensor_format import TensorEntry

LEFT = (Part.HADA_W1_A, Part.HADA_W2_A)
RIGHT = (Part.HADA_W1_B, Part.HADA_W2_B)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LohaFactors:
    """The four factors of one module."""

    w1_a: torch.Tensor
    """`[O, r]`."""
    w1_b: torch.Tensor
    """`[r, I]`."""
    w2_a: torch.Tensor
    """`[O, r]`."""
    w2_b: torch.Tensor
    """`[r, I]`."""
    alpha: float
    """Alpha of the module; the scaling is ``alpha / r``."""
    dtype: torch.dtype
    """Type of the pair."""

    @property
    def stored_rank(self) -> int:
        """`r`."""
        return self.w1_a.shape[1]

    @property
    def out_features(self) -> int:
        """`O`."""
        return self.w1_a.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the four factors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> Mapping[Part, torch.Tensor]:
        """Return the factors, by part."""
        parts = (self.w1_a, self.w2_a, self.w1_b, self.w2_b)
        return MappingProxyType(dict(zip((*LEFT, *RIGHT), parts, strict=True)))

    def rank(self, in_features: int | None = None) -> int:
        """Return ``min(r*r, O, I)``."""
        del in_features
        return min(self.stored_rank**2, self.out_features, self.w1_b.shape[1])

    def fits(self, in_features: int) -> bool:
        """Return whether `I` is that of the factors."""
        return in_features == self.w1_b.shape[1]

    def to_pair(self, in_features: int) -> LoraPair:
        """Return the exact pair."""
        assert self.fits(in_features)
        w1_a, w1_b, w2_a, w2_b = (t.float() for t in (self.w1_a, self.w1_b, self.w2_a, self.w2_b))
        scaling = self.alpha / self.stored_rank
        if self.rank() < self.stored_rank**2:
            return product_pair((w1_a @ w1_b) * (w2_a @ w2_b) * scaling, self.dtype)
        lora_b = (w1_a[:, :, None] * w2_a[:, None, :]).flatten(1) * scaling  # [O, r, r] -> [O, r*r]
        lora_a = (w1_b[:, None, :] * w2_b[None, :, :]).flatten(0, 1)  # [r, r, I] -> [r*r, I]
        return LoraPair(lora_a=lora_a.to(self.dtype), lora_b=lora_b.to(self.dtype))


def check_factors(module: str, parts: Mapping[Part, TensorEntry], rank: int) -> Iterator[Problem]:
    """Yield what is wrong with the shapes of one module's factors.

    Args:
        module: module path.
        parts: its four factors.
        rank: the rank that the configuration gives the module.
    """
    sizes = {}
    for part in (*LEFT, *RIGHT):
        axis = 1 if part in LEFT else 0
        shape = parts[part].shape
        form = f"[O, {rank}]" if axis else f"[{rank}, I]"
        if len(shape) != 2 or shape[axis] != rank or not shape[1 - axis]:  # noqa: PLR2004
            yield _mismatch(module, part, shape, f"{form} (rank {rank} by {CONFIG_FILE})")
        else:
            sizes[part] = shape[1 - axis]
    for first, second in (LEFT, RIGHT):
        if sizes.get(first, 0) != sizes.get(second, sizes.get(first, 0)):
            yield _mismatch(module, second, parts[second].shape, f"the size of {first}")


def _mismatch(module: str, part: Part, shape: tuple[int, ...], expected: str) -> Problem:
    return Problem(
        code=ProblemCode.SHAPE_MISMATCH,
        module=module,
        tensor=part,
        found=str(list(shape)),
        expected=expected,
    )
