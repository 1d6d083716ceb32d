"""How much an adapter changes the modules of one model: norms of its updates, as slots hold them.

Letters: `r` rank, `I` in, `O` out, `X` experts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lora_layers.content import ExpertContent, SlotContent
from lora_layers.wrappers import ExpertStack, SlotStack
from lora_weights import product_norm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lora_layers.content import Pair, PreparedAdapter


def update_norms(
    prepared: PreparedAdapter, stacks: Mapping[str, SlotStack | ExpertStack]
) -> dict[str, float]:
    """Return the Frobenius norm of ``B A``, scaling included, of every module with a pair.

    Nothing of the size of a weight is formed. Gains, biases and whole modules have no pair and are
    not in it.

    Args:
        prepared: what the slots would get.
        stacks: the model's slots, by path.

    Returns:
        Path of a module, as adapters name it, or of an experts module over all its experts.
    """
    norms: dict[str, float] = {}
    for path, content in prepared.contents.items():
        stack = stacks[path]
        if isinstance(content, ExpertContent) and isinstance(stack, ExpertStack):
            pairs = [pair for pair in (*content.w13, content.w2) if pair is not None]
            squares = [_expert_square(pair, stack.shape.num_experts) for pair in pairs]
            norms[path] = math.sqrt(sum(squares))
        elif isinstance(content, SlotContent) and isinstance(stack, SlotStack):
            pieces = zip(stack.member_paths, content.slices, strict=True)
            norms |= {member: product_norm(*pair) for member, pair in pieces if pair is not None}
    return norms


def _expert_square(pair: Pair, num_experts: int) -> float:
    """Return the squared norm over all experts; factors that they share count for each."""
    is_shared = pair[0].shape[0] == pair[1].shape[0] == 1
    return product_norm(*pair) ** 2 * (num_experts if is_shared else 1)
