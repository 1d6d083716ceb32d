"""ExpertLayout: turns an adapter's pairs of experts into what a slot of one module takes.

Letters: `X` experts, `r` rank, `I` in, `O` out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_layers.content import ExpertContent
from lora_weights import Problem, ProblemCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from lora_layers.content import Pair
    from lora_weights import ExpertPair, ExpertPart, ExpertShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """What preparation needs to know of the slots of one fused experts module."""

    shape: ExpertShape
    """Sizes of the module."""
    dtype: torch.dtype
    """dtype of the slots."""
    shares_outer: bool
    """The slots hold one A for gate and up, and one B for down, for all experts."""

    def problems(self, path: str, part: ExpertPart) -> Iterator[Problem]:
        """Yield what the slots cannot take of an adapter's part."""
        if not self.shares_outer:
            return
        for name, pair, factor in (("w1", part.w1, 0), ("w3", part.w3, 0), ("w2", part.w2, 1)):
            if pair is None:
                continue
            tensor = (pair.lora_a, pair.lora_b)[factor]
            if tensor.shape[0] != 1:
                yield Problem(
                    code=ProblemCode.SHAPE_MISMATCH,
                    module=path,
                    tensor=f"{('lora_A', 'lora_B')[factor]} of {name}",
                    found=f"one for each of {tensor.shape[0]} experts",
                    expected="one that all experts share, since moe_shared_loras is set",
                )

    def content(self, part: ExpertPart) -> ExpertContent:
        """Cast a part to the slots' dtype, keeping factors shared where they are."""
        pairs = (part.w1, part.w3) if self.shape.is_gated else (part.w1,)
        return ExpertContent(w13=tuple(self._cast(pair) for pair in pairs), w2=self._cast(part.w2))

    def _cast(self, pair: ExpertPair | None) -> Pair | None:
        if pair is None:
            return None
        return pair.lora_a.to(self.dtype), pair.lora_b.to(self.dtype)
