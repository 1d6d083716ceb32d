"""What one adapter puts into a slot of each wrapped module, packed and cast.

Values only: nothing of matching, slots or residency. Letters: `r` rank, `I` in, `O_p` out of slice
`p`, `P` slices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from lora_weights import product_norm

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from lora_weights import FullModule

Pair: TypeAlias = tuple[Tensor, Tensor]
"""`(lora_a [r, I], lora_b [O_p, r])`, scaling folded into B."""

Slices: TypeAlias = tuple[Pair | None, ...]
"""A pair for each slice; None for a slice the adapter leaves alone."""


_CANCELLED = 1e-6
"""Norm of a product, relative to those of its factors, below which it may be rounding alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotContent:
    """What one slot of one module or packed group gets.

    With `y` the base output: `y' = gain * (y + B A x) + bias`, and in the columns of a slice with a
    full module `y' = x W^T + b` instead.
    """

    slices: Slices
    """Pairs in the slots' dtype, `P` of them."""
    gain: Tensor | None = None
    """`[sum O_p]` float32: DoRA's magnitude over norm, or IA3's factors. None: 1 everywhere."""
    bias: Tensor | None = None
    """`[sum O_p]` float32, added last. None: 0 everywhere."""
    fulls: tuple[FullModule | None, ...] = ()
    """Whole replacements by slice, in the base's dtype; empty when there is none."""

    @property
    def rank(self) -> int:
        """Largest rank of any slice; 0 without pairs."""
        return max((pair[0].shape[0] for pair in self.slices if pair is not None), default=0)

    @property
    def is_linear(self) -> bool:
        """Whether half the scale means half the change, so that adapters can be weighted."""
        return self.gain is None and not any(self.fulls)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with a name for messages."""
        for index, pair in enumerate(self.slices):
            for name, tensor in zip(("lora_A", "lora_B"), pair or (), strict=False):
                yield f"{name} of slice {index}", tensor
        for name, vector in (("gain", self.gain), ("bias", self.bias)):
            if vector is not None:
                yield name, vector
        for index, full in enumerate(self.fulls):
            if full is not None:
                yield f"weight of slice {index}", full.weight
                if full.bias is not None:
                    yield f"bias of slice {index}", full.bias

    def has_effect(self) -> bool:
        """Whether anything in it changes an output."""
        if any(pair is not None and _has_product(pair) for pair in self.slices):
            return True
        if self.gain is not None and bool((self.gain != 1).any()):
            return True
        return any(self.fulls) or (self.bias is not None and bool(self.bias.any()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertContent:
    """What one slot of one fused experts module gets.

    A pair is `(lora_a [X, r, I], lora_b [X, O, r])`; a leading 1 is a factor all experts share.
    """

    w13: Slices
    """Gate and up; one pair for experts without a gate."""
    w2: Pair | None = None
    """Down."""

    is_linear = True
    """Pairs alone can be weighted."""

    @property
    def rank(self) -> int:
        """Largest rank of any pair; 0 without pairs."""
        return max(
            (pair[0].shape[1] for pair in (*self.w13, self.w2) if pair is not None), default=0
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with a name for messages."""
        names = ("w1", "w3")[: len(self.w13)]
        for name, pair in (*zip(names, self.w13, strict=True), ("w2", self.w2)):
            for factor, tensor in zip(("lora_A", "lora_B"), pair or (), strict=False):
                yield f"{factor} of {name}", tensor

    def has_effect(self) -> bool:
        """Whether anything in it changes an output."""
        return any(pair is not None and _has_product(pair) for pair in (*self.w13, self.w2))


def _has_product(pair: Pair) -> bool:
    """Whether `B A` is anything but zero: factors that are not can cancel each other."""
    lora_a, lora_b = pair
    if not (lora_a.any() and lora_b.any()):
        return False
    largest = torch.linalg.vector_norm(lora_a.double()) * torch.linalg.vector_norm(lora_b.double())
    if product_norm(lora_a, lora_b) > _CANCELLED * float(largest):
        return True
    # Too small to be told from rounding: the product itself says. Products of two such factors are
    # exact in float64.
    return bool((lora_b.double() @ lora_a.double()).any())


Content: TypeAlias = SlotContent | ExpertContent
"""What one slot of one stack gets."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedAdapter:
    """An adapter matched with one model, packed and cast, ready for a slot."""

    contents: Mapping[str, Content] = field(repr=False)
    """Path of a module or packed group -> what its slot gets; other modules are left alone."""
    rank: int
    """Largest rank of any pair."""
    nbytes: int
    """Bytes of all tensors, true ranks, nothing padded, a tensor shared by slices counted once."""
    is_linear: bool
    """Whether it can take a scale other than 1, or be one of a weighted set."""
    num_labels: int | None
    """Labels of its own classification head; None without one."""
    digest: str
    """The adapter's digest; empty for a dummy."""
    source: str
    """Where the adapter was read from; shown, never opened."""


def make_prepared(
    contents: Mapping[str, Content],
    *,
    num_labels: int | None = None,
    digest: str = "",
    source: str = "",
) -> PreparedAdapter:
    """Wrap the contents of all modules up with their rank and size."""
    return PreparedAdapter(
        contents=contents,
        rank=max((content.rank for content in contents.values()), default=0),
        nbytes=_count_bytes(contents.values()),
        is_linear=all(content.is_linear for content in contents.values()),
        num_labels=num_labels,
        digest=digest,
        source=source,
    )


def _count_bytes(contents: Iterable[Content]) -> int:
    tensors = {}
    for content in contents:
        for _, tensor in content.tensors():
            # What is broadcast takes the bytes of its storage, not those of its shape.
            nbytes = min(tensor.nbytes, tensor.untyped_storage().nbytes())
            tensors[tensor.data_ptr(), tensor.shape] = nbytes
    return sum(tensors.values())
