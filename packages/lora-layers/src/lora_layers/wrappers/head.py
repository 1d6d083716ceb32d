"""ClassificationHeadWithLora: the label layer of a head, which adapters bring with their own rows.

Letters: `T` rows, `I` in, `O` labels of the base, `O_s` labels of the adapter in slot `s`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from lora_kernels import Routing, apply_lora_
from lora_layers.wrappers.base import check_rows
from lora_layers.wrappers.linear import LoraLinear

if TYPE_CHECKING:
    from torch import Tensor

    from lora_layers.wrappers.base import SlotStack


class ClassificationHeadWithLora(LoraLinear):
    """`y[t] = x[t] W_s^T + b_s` for rows of an adapter with its own head, else as `LoraLinear`.

    Adapters may have other numbers of labels than the base. Then the output is as wide as the
    widest row of the step, and whoever reads row `t` takes its first `O_s` columns (`O` for a row
    without a head of its own); the rest is zero.

    Whether a row is a sequence or a token is the caller's: it gives as many rows as it has routed.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., I]` to `[..., widest of the step]`.

        Raises:
            RoutingNotSetError: no routing is set, or it has another number of rows.
            InferenceOnlyError: gradients are on.
        """
        y = self.product(x)
        stack = self.stack
        routing = stack.cell.active
        if routing is None or stack.is_idle:
            return y
        rows = x.reshape(-1, x.shape[-1])
        checked = check_rows(stack.path, routing, y, rows.shape[0])
        y_rows = y.view(-1, y.shape[-1])
        apply_lora_(y_rows, rows, stack.weights, checked, backend=stack.backend)
        wide = _replace_rows(y_rows, rows, stack, checked)
        return wide.view(*x.shape[:-1], wide.shape[-1])


def _replace_rows(y: Tensor, x: Tensor, stack: SlotStack, routing: Routing) -> Tensor:
    """Return `y [T, O]` with the rows of adapters that have a head replaced, widened if need be."""
    heads = [
        (full, rows)
        for fulls, rows in stack.fulls.touched(routing)
        for full in fulls
        if full is not None
    ]
    width = max((full.weight.shape[0] for full, _ in heads), default=0)
    if width > y.shape[1]:
        y = functional.pad(y, (0, width - y.shape[1]))
    for full, rows in heads:
        num_labels = full.weight.shape[0]
        y[rows, :num_labels] = functional.linear(x[rows], full.weight, full.bias)
        y[rows, num_labels:] = 0.0
    return y
