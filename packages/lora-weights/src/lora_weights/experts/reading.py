"""Which tensors of a file the experts of one expert-parallel rank need. Opens no file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_weights.experts.names import parse_expert
from lora_weights.names import parse_key

if TYPE_CHECKING:
    from lora_weights.selection import Selector
    from lora_weights.tensor_format import TensorEntry

_STACKED_AXES = 3


def select_experts(local: range) -> Selector:
    """Return what to read of each tensor for a block of the experts.

    Single experts outside the block are left out. Of stacked projections the rows of the block
    are read, and factors that all experts share whole. Pairs on parameters are read whole: their
    B has the expert as the fastest index, so that every expert is in every stretch of the file.

    Args:
        local: the block, by index in the whole model.
    """

    def select(entry: TensorEntry) -> range | None:
        name = parse_expert(parse_key(entry.key).module)
        if name is None:
            return None
        if name.expert is not None:
            return None if name.expert in local else range(0)
        is_stacked = not name.is_parameter and len(entry.shape) == _STACKED_AXES
        if is_stacked and entry.shape[0] > 1 and local.stop <= entry.shape[0]:
            return local
        return None

    return select
