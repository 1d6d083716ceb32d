"""LoraLinear: one linear module (`nn.Linear`, a subclass, or a Conv1D-like one) with slots.

Letters: `T` rows, `I` in, `O` out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_kernels import Routing, apply_lora_
from lora_layers.wrappers.base import LoraModule, SlotStack, check_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from lora_layers.step import NoRouting


class LoraLinear(LoraModule):
    """`y = base(x) + sum of scale * B (A x)` over the adapters of each row.

    Rows of an adapter with a gain, a bias or a weight of its own: see `SlotContent`.

    The base module's own forward (and hooks) give the first term, so subclasses with a forward of
    their own keep it; a prepacked product takes its place where one is given.
    """

    stack: SlotStack
    product: Callable[[Tensor], Tensor]

    def __init__(
        self, base_layer: nn.Module, stack: SlotStack, product: Callable[[Tensor], Tensor] | None
    ) -> None:
        """Take the place of `base_layer`.

        Args:
            base_layer: maps `[..., I]` to `[..., O]`.
            stack: its slots.
            product: computes what `base_layer` would; None calls the module itself.
        """
        super().__init__(base_layer)
        object.__setattr__(self, "stack", stack)
        object.__setattr__(self, "product", product or base_layer)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., I]` to `[..., O]`."""
        y = self.product(x)
        stack = self.stack
        routing = stack.cell.active
        if routing is not None and not stack.is_idle:
            add_delta_(y, x, stack, routing)
        return y


def add_delta_(y: Tensor, x: Tensor, stack: SlotStack, routing: Routing | NoRouting) -> None:
    """Bring in what the step's adapters do: `y [..., sum O_p]` in place, for `x [..., I]`.

    Raises:
        RoutingNotSetError: no routing is set, or it has another number of rows.
        InferenceOnlyError: gradients are on.
    """
    rows = x.reshape(-1, x.shape[-1])
    checked = check_rows(stack.path, routing, y, rows.shape[0])
    y_rows = y.view(-1, y.shape[-1])  # a view: a copy would be written in vain
    apply_lora_(y_rows, rows, stack.weights, checked, backend=stack.backend)
    stack.fulls.replace_outputs_(y_rows, rows, checked)
