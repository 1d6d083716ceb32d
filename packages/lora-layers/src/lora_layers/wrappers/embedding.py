"""LoraEmbedding: one `nn.Embedding` with slots.

Letters: `T` rows, `D` embedding width, `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lora_kernels import embedding_lora_
from lora_layers.wrappers.base import LoraModule, SlotStack, check_rows


class LoraEmbedding(LoraModule):
    """`y[t] = base(id[t]) + sum of scale * B A[:, id[t]]` over the adapters of row `t`.

    The base's own forward gives the first term. Where it multiplies by an `embed_scale` (Gemma), so
    does PEFT with the delta: `embed_scale` says by how much, and whoever fills the slots has
    multiplied B with it.
    """

    stack: SlotStack

    def __init__(self, base_layer: nn.Module, stack: SlotStack) -> None:
        """Take the place of `base_layer`, which maps ids `[...]` to `[..., D]`."""
        super().__init__(base_layer)
        object.__setattr__(self, "stack", stack)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map ids `[...]`, integers, to `[..., D]`."""
        y: Tensor = self.base_layer(input_ids)
        stack = self.stack
        routing = stack.cell.active
        if routing is not None and not stack.is_idle:
            ids = input_ids.reshape(-1)
            checked = check_rows(stack.path, routing, y, ids.shape[0])
            y_rows = y.view(-1, y.shape[-1])
            embedding_lora_(y_rows, ids, stack.weights, checked, backend=stack.backend)
            stack.fulls.replace_rows_(y_rows, ids, checked)
        return y


def find_embed_scale(module: nn.Module) -> float:
    """Return the factor a scaled embedding applies to its output; 1 for a plain one.

    It is read from the attribute `embed_scale`, a number or a tensor of one element, the place
    where PEFT looks too.
    """
    scale = getattr(module, "embed_scale", None)
    if isinstance(scale, int | float):
        weight = module.weight
        assert isinstance(weight, Tensor)
        return float(torch.tensor(scale, dtype=weight.dtype))  # PEFT rounds a plain number so
    if isinstance(scale, Tensor) and scale.numel() == 1 and not scale.is_meta:
        return float(scale)
    return 1.0
