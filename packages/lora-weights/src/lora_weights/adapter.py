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
    base_copies: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    """Module path -> copy of the base's own weight, which PEFT saves beside an embedding's pair.

    They are applied only by being equal to the base's weight; `bind_adapter` compares them.
    """

    @property
    def rank(self) -> int:
        """Largest rank of any pair; 0 when there is none."""
        wholes = [(part.pair, part.experts) for part in self.parts.values()]
        return max((part.rank for pair in wholes for part in pair if part), default=0)

    @property
    def is_linear(self) -> bool:
        """Whether it may be scaled, or be one of a weighted set: no gain and no whole module."""
        return all(part.is_linear for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the parts."""
        return sum(part.nbytes for part in self.parts.values())
