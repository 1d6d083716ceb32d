"""LinearParts: what a wrapped linear module is made of, for kernels that compute whole layers.

Letters: `T` rows, `I` in, `O` out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lora_kernels import Backend, Routing
from lora_kernels.native import PackedProduct, lora_addresses
from lora_layers.wrappers.linear import LoraLinear
from lora_layers.wrappers.packed import PackedMember

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from lora_layers.wrappers.base import SlotStack

_NOTHING = (0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class LinearParts:
    """The base product of a wrapped linear module, or of a packed group, and its slots."""

    product: PackedProduct
    """Maps `[T, I]` to `[T, O]`, all slices side by side."""
    stack: SlotStack
    """What the adapters add."""

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
        stack = self.stack
        routing = stack.cell.active
        if routing is None or stack.is_idle:
            return _NOTHING
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
