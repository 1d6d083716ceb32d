"""What an update is made of, where it is not stored as A and B but has an exact low rank.

Shapes: `r` rank of the stored factors, `R` rank of the pair they make, `I` in, `O` out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from lora_weights.modules import LoraPair

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lora_weights.names import Part


class Factors(Protocol):
    """Factors of one module's update. They become a pair when the module's size is known."""

    @property
    def stored_rank(self) -> int:
        """`r` of the configuration."""

    @property
    def alpha(self) -> float:
        """Alpha of the configuration; the scaling is ``alpha / r``."""

    @property
    def out_features(self) -> int:
        """`O`."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""

    def tensors(self) -> Mapping[Part, torch.Tensor]:
        """Return the tensors as stored, by part."""

    def rank(self, in_features: int | None = None) -> int:
        """Return `R`, the rank of the pair.

        Args:
            in_features: `I`; None where only the file is known.
        """

    def fits(self, in_features: int) -> bool:
        """Return whether the factors are those of a module with so many inputs."""

    def to_pair(self, in_features: int) -> LoraPair:
        """Return the exact pair, computed in float32 and rounded once, scaling in B."""


def product_pair(product: torch.Tensor, dtype: torch.dtype) -> LoraPair:
    """Return an update itself as a pair, with the identity: rank ``min(O, I)``.

    Args:
        product: `[O, I]`, float32, scaling in it.
        dtype: type of the pair.
    """
    out_features, in_features = product.shape
    identity = torch.eye(min(product.shape), dtype=dtype)
    if in_features <= out_features:
        return LoraPair(lora_a=identity, lora_b=product.to(dtype))
    return LoraPair(lora_a=product.to(dtype), lora_b=identity)
