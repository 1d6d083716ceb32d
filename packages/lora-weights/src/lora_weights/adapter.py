"""An adapter in memory: configuration, one part per module, digest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from lora_weights.config import AdapterConfig
    from lora_weights.modules import ModulePart


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BaseCopy:
    """Copies of one base module's own tensors, which PEFT saves beside some parts.

    They are applied only by being equal to the base's; `bind_adapter` compares them.
    """

    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensor key -> copy of the weight."""
    biases: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensor key -> copy of the bias."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """One LoRA with all its parts, read and checked; not yet matched with a base model.

    Its tensors may share memory and stay valid as long as anything refers to them. They are not
    to be written.
    """

    config: AdapterConfig
    """The checked configuration."""
    parts: Mapping[str, ModulePart] = field(repr=False)
    """Module path as the checkpoint spells it, without PEFT's prefix -> what the module gets."""
    digest: str
    """SHA-256 of what the adapter does, 64 hex digits."""
    source: str
    """Absolute folder it was read from; shown, never opened again."""
    base_copies: Mapping[str, BaseCopy] = field(default_factory=dict, repr=False)
    """Module path -> copies of the base's own tensors that the file holds."""
    experts: range | None = None
    """The experts that were asked for, by index in the whole model; None is all of them."""
    num_tensors: int = 0
    """Tensors in the file."""
    skipped: tuple[str, ...] = ()
    """Keys of tensors left out: below a prefix that the caller skips, or state of training."""

    @property
    def num_applied(self) -> int:
        """Tensors of the file that an output depends on.

        The others are state of training, outside of what the caller asked for, or copies of the
        base's, which are compared and dropped.
        """
        copies = sum(len(copy.weights) + len(copy.biases) for copy in self.base_copies.values())
        return self.num_tensors - len(self.skipped) - copies

    @property
    def rank(self) -> int:
        """Largest rank of any pair, those of other methods' factors included; 0 without any."""
        return max((part.rank for part in self.parts.values()), default=0)

    @property
    def is_linear(self) -> bool:
        """Whether it may be scaled, or be one of a weighted set: no gain and no whole module."""
        return all(part.is_linear for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the parts; what modules share counts in none of them."""
        return sum(part.nbytes for part in self.parts.values())
