"""What a fused experts module computes, taken apart so that deltas have a place.

The form is that of transformers 5 (`integrations/moe.py`): all experts of a layer in 3D parameters
`gate_up_proj` (or `up_proj`) and `down_proj`, called with `(hidden [T, H], ids [T, K],
router weights [T, K])`. It is recognised by its attributes, not by its class.

Letters: `T` tokens, `K` experts a token, `X` experts, `H` hidden size, `F` intermediate size,
`S = T * K` rows, a token's choices side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from lora_weights import ExpertShape

EXPERT_DIMS = 3

DESCRIPTION = (
    "has_gate",
    "has_bias",
    "has_post_expert_norm",
    "is_transposed",
    "is_concatenated",
    "_apply_gate",
)
"""Attributes by which an experts module says how it is to be computed."""


def holds_experts(module: nn.Module) -> bool:
    """Whether the module owns stacked weights of experts, in a known form or not."""
    weight = getattr(module, "down_proj", None)
    return isinstance(weight, nn.Parameter) and weight.ndim == EXPERT_DIMS


def read_expert_shape(module: nn.Module) -> ExpertShape | None:
    """Return the sizes of a fused experts module; None for any other, or an unknown form."""
    if not holds_experts(module) or not all(hasattr(module, name) for name in DESCRIPTION):
        return None
    described = cast("Any", module)
    stacked = getattr(module, _first_name(module), None)
    if not isinstance(stacked, nn.Parameter) or stacked.ndim != EXPERT_DIMS:
        return None
    first = stacked.transpose(1, 2) if described.is_transposed else stacked
    rows, hidden_size = first.shape[1:]
    return ExpertShape(
        num_experts=first.shape[0],
        hidden_size=hidden_size,
        intermediate_size=rows // 2 if described.has_gate else rows,
        is_gated=described.has_gate,
        is_interleaved=described.has_gate and not described.is_concatenated,
        is_transposed=described.is_transposed,
    )


def _first_name(module: nn.Module) -> str:
    return "gate_up_proj" if cast("Any", module).has_gate else "up_proj"


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """A step's rows sorted by expert; rows without a local expert are left out."""

    rows: Tensor
    """`[S']` row numbers in `0..S-1`, by expert."""
    bounds: tuple[int, ...]
    """`X + 1` bounds in `rows`: expert `x` has `rows[bounds[x] : bounds[x + 1]]`."""


def order_by_expert(expert_ids: Tensor, num_experts: int) -> ExpertOrder:
    """Sort the rows of a step by expert.

    Args:
        expert_ids: the router's choice, `[T, K]`; a number outside `0..X-1` marks a row that has
            no expert here.
        num_experts: `X`.
    """
    flat = expert_ids.reshape(-1)
    is_local = (flat >= 0) & (flat < num_experts)
    rows = torch.argsort(flat.masked_fill(~is_local, num_experts), stable=True)
    counts = torch.bincount(flat[is_local], minlength=num_experts).tolist()
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return ExpertOrder(rows=rows[: bounds[-1]], bounds=tuple(bounds))


class BaseExperts:
    """The products of a fused experts module, one after another."""

    def __init__(self, module: nn.Module) -> None:
        """Read the parameters of `module`, which stay where they are."""
        described = cast("Any", module)
        self._module = described
        self._transposed: bool = described.is_transposed
        self._first = _first_name(module)
        axis = 2 if self._transposed else 1
        self._widths = {n: getattr(module, n).shape[axis] for n in (self._first, "down_proj")}

    def up(self, x: Tensor, order: ExpertOrder, num_choices: int) -> Tensor:
        """Return the first product of every row.

        Args:
            x: `[T, H]`.
            order: the step's rows by expert.
            num_choices: `K`.

        Returns:
            `[S, 2 F]` (`[S, F]` without gate), in the base's own order of gate and up.
        """
        taken = x[torch.div(order.rows, num_choices, rounding_mode="floor")]
        return self._product(taken, self._first, order, x.shape[0] * num_choices)

    def activate(self, gate_up: Tensor) -> Tensor:
        """Map `[S, 2 F]` (`[S, F]` without gate) to `[S, F]`."""
        module = self._module
        result: Tensor = module._apply_gate(gate_up) if module.has_gate else module.act_fn(gate_up)  # noqa: SLF001
        return result

    def down(self, inner: Tensor, order: ExpertOrder) -> Tensor:
        """Map `[S, F]` to `[S, H]`."""
        return self._product(inner[order.rows], "down_proj", order, inner.shape[0])

    def combine(self, out: Tensor, router_weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weighted sum of each token's rows, added up in float32.

        Args:
            out: `[S, H]`.
            router_weights: `[T, K]`.
            dtype: of the result.
        """
        if self._module.has_post_expert_norm:
            out = self._module.post_expert_norm(out)
        weighted = out.view(*router_weights.shape, -1) * router_weights.unsqueeze(-1)
        return weighted.sum(dim=1, dtype=torch.float32).to(dtype)

    def _product(self, x: Tensor, name: str, order: ExpertOrder, num_rows: int) -> Tensor:
        """Multiply rows sorted by expert, `[S', I]`; return them in their own places, `[S, O]`."""
        weight: Tensor = getattr(self._module, name)
        bias: Tensor | None = (
            getattr(self._module, f"{name}_bias") if self._module.has_bias else None
        )
        products = []
        for expert, (start, end) in enumerate(pairwise(order.bounds)):
            if end > start:
                matrix = weight[expert] if self._transposed else weight[expert].t()
                rows = x[start:end]
                products.append(
                    rows @ matrix if bias is None else torch.addmm(bias[expert], rows, matrix)
                )
        y = torch.cat(products) if products else x.new_zeros(0, self._widths[name])
        return x.new_zeros(num_rows, self._widths[name]).index_copy_(0, order.rows, y)
