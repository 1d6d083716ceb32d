"""LinearParts, EmbeddingParts: what wrapped modules are made of, for kernels that do more at once.

Letters: `T` rows, `I` in, `O` out, `V` vocabulary, `D` embedding width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from lora_kernels import Backend, Routing
from lora_kernels.native import PackedProduct, lora_addresses
from lora_layers.wrappers.embedding import LoraEmbedding
from lora_layers.wrappers.linear import LoraLinear
from lora_layers.wrappers.packed import PackedMember

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lora_layers.wrappers.base import SlotStack

_NOTHING = (0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class LinearParts:
    """The base product of a wrapped linear module, or of a packed group, and its slots."""

    product: PackedProduct
    """Maps `[T, I]` to `[T, O]`, all slices side by side."""
    stack: SlotStack
    """What the adapters add."""

    @property
    def is_plain(self) -> bool:
        """Whether the module is its product alone, to which the step's adapters add nothing."""
        return self.stack.cell.active is None or self.stack.is_idle

    def adapter_addresses(self, num_rows: int) -> tuple[int, int] | None:
        """Return where the native kernels find the module's slots and the step's routing.

        Args:
            num_rows: rows the module will be called with.

        Returns:
            Addresses of `lora::Module` and `lora::Step`; zeros when the step's adapters add nothing
            here; None when the modules themselves must be called: they do what these kernels
            cannot, or say what is wrong. The answer is another one when the stack's cell has
            another routing or another number of writes.
        """
        if self.is_plain:
            return _NOTHING
        stack = self.stack
        routing = stack.cell.active
        is_right = isinstance(routing, Routing) and routing.num_tokens == num_rows
        if not is_right or stack.backend is not Backend.NATIVE:
            return None
        assert isinstance(routing, Routing)
        if stack.fulls.touched(routing):
            return None
        return lora_addresses(stack.weights, routing, torch.bfloat16)


def linear_parts(modules: Sequence[nn.Module]) -> LinearParts | None:
    """Return the parts of one wrapped linear module, or of all members of a packed group in order.

    None where there are none to hand out: the modules are not wrapped, are not one product, or
    their product is not packed for the native kernels.
    """
    first = modules[0]
    if isinstance(first, PackedMember):
        found = first.group.parts_of(modules)
    elif type(first) is LoraLinear and len(modules) == 1:
        found = first.product, first.stack
    else:
        return None
    if found is None or not isinstance(found[0], PackedProduct):
        return None
    return LinearParts(found[0], found[1])


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingParts:
    """The table of an embedding, and its slots."""

    weight: torch.Tensor
    """`[V, D]`, rows contiguous."""
    stack: SlotStack | None
    """What the adapters add; None of a module that is not wrapped."""

    @property
    def is_plain(self) -> bool:
        """Whether the module gives rows of the table, to which the step's adapters add nothing."""
        stack = self.stack
        return stack is None or stack.cell.active is None or stack.is_idle


def embedding_parts(module: nn.Module) -> EmbeddingParts | None:
    """Return the parts of an embedding, wrapped or not; None where it does more than look up."""
    stack: SlotStack | None = None
    base = module
    if isinstance(module, LoraEmbedding):
        stack, base = module.stack, module.base_layer
    if type(base) is not nn.Embedding or base.max_norm is not None:
        return None
    if any(part._forward_hooks or part._forward_pre_hooks for part in (module, base)):  # noqa: SLF001
        return None
    if not base.weight.is_contiguous():
        return None
    return EmbeddingParts(base.weight, stack)
