"""AngleTable: the rotary embeddings of all positions, as a model's own module gives them.

Letters: `W` head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

_STATIC_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embedding whose angles follow from the position alone. Those of the others
change with the longest sequence that was seen."""
_FIRST_SIZE = 4096


class AngleTable:
    """Cosines and sines, computed for more positions when a step asks for them."""

    def __init__(self, module: nn.Module, width: int) -> None:
        """Start empty.

        Args:
            module: the model's; `is_static` of it.
            width: `W`.
        """
        self._module = module
        self._width = width
        self._parts = torch.empty(0, 0), torch.empty(0, 0)

    @torch.inference_mode()
    def addresses(self, num_positions: int) -> tuple[int, int]:
        """Return where cosines and sines `[positions, W]` bfloat16 are, valid until the next call.

        Args:
            num_positions: how many are needed at least.
        """
        if num_positions > self._parts[0].shape[0]:
            self._compute(max(_FIRST_SIZE, 2 * num_positions))
        cosine, sine = self._parts
        return cosine.data_ptr(), sine.data_ptr()

    def _compute(self, size: int) -> None:
        example = torch.empty(1, 1, self._width, dtype=torch.bfloat16)
        cosine, sine = self._module(example, position_ids=torch.arange(size).unsqueeze(0))
        self._parts = _as_table(cosine), _as_table(sine)
        assert self._parts[0].shape == self._parts[1].shape == (size, self._width)


def is_static(module: Any) -> bool:
    """Whether a rotary embedding's angles follow from the position alone."""
    return getattr(module, "rope_type", None) in _STATIC_TYPES


def _as_table(angles: torch.Tensor) -> torch.Tensor:
    return angles[0].bfloat16().contiguous()
