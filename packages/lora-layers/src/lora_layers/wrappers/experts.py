"""LoraExperts: one fused experts module with slots.

Letters: `T` tokens, `K` experts a token, `X` experts, `R` max rank, `H` hidden, `F` intermediate,
`S = T * K` rows, a token's choices side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_kernels import Backend, ExpertWeights, align_experts, moe_lora_
from lora_layers.wrappers.base import LoraModule, check_rows
from lora_layers.wrappers.base_experts import BaseExperts, order_by_expert

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from lora_kernels import ExpertRouting
    from lora_layers.content import ExpertContent
    from lora_layers.step import RoutingCell
    from lora_weights import ExpertShape


class ExpertStack:
    """The slots of one fused experts module, and the step's routing.

    Two stages: w13 (gate and up, before the activation) and w2 (down, before the weighted sum).
    """

    __slots__ = ("backend", "cell", "is_idle", "occupied", "path", "shape", "w2", "w13")

    def __init__(
        self,
        *,
        path: str,
        shape: ExpertShape,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        shares_outer: bool,
        cell: RoutingCell,
        backend: Backend,
    ) -> None:
        """Allocate zeros for all slots.

        Args:
            path: where the module is.
            shape: its sizes.
            num_slots: `N`.
            max_rank: `R`.
            dtype: of the slots.
            device: of the slots.
            shares_outer: adapters share the factors next to the hidden state between experts: A of
                w13 and B of w2 are held once.
            cell: where the step's routing is read.
            backend: implementation of the operators.
        """
        self.path = path
        self.shape = shape
        self.cell = cell
        self.backend = backend
        num_slices = 2 if shape.is_gated else 1
        self.w13 = ExpertWeights.allocate(
            num_slots=num_slots,
            num_experts=shape.num_experts,
            max_rank=max_rank,
            in_features=shape.hidden_size,
            out_features=[shape.intermediate_size] * num_slices,
            dtype=dtype,
            device=device,
            is_a_shared=shares_outer,
        )
        self.w2 = ExpertWeights.allocate(
            num_slots=num_slots,
            num_experts=shape.num_experts,
            max_rank=max_rank,
            in_features=shape.intermediate_size,
            out_features=[shape.hidden_size],
            dtype=dtype,
            device=device,
            is_b_shared=shares_outer,
        )
        self.occupied: set[int] = set()
        """Slots that hold anything."""
        self.is_idle = True
        """No slot holds anything."""

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.w13.nbytes + self.w2.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """Of the slots."""
        return self.w13.dtype

    def write(self, slot: int, content: ExpertContent) -> None:
        """Replace what `slot` holds; the slot counts as written even when this raises."""
        self.occupied.add(slot)
        self.is_idle = False
        self.w13.write_slot(slot, content.w13)
        self.w2.write_slot(slot, [content.w2])

    def reset(self, slot: int) -> None:
        """Zero `slot`; free when it holds nothing."""
        if slot in self.occupied:
            self.w13.reset_slot(slot)
            self.w2.reset_slot(slot)
            self.occupied.discard(slot)
            self.is_idle = not self.occupied


class LoraExperts(LoraModule):
    """Experts whose rows each may use another adapter.

    The base's products run here and not in its own forward, since a delta belongs between the
    first product and the activation. They run here in steps without adapters too, so that a base
    token's result does not depend on its neighbours.
    """

    stack: ExpertStack
    base: BaseExperts

    def __init__(self, base_layer: nn.Module, stack: ExpertStack) -> None:
        """Take the place of `base_layer`, which `read_expert_shape` recognised."""
        super().__init__(base_layer)
        object.__setattr__(self, "stack", stack)
        object.__setattr__(self, "base", BaseExperts(base_layer))

    def forward(self, hidden_states: Tensor, expert_ids: Tensor, router_weights: Tensor) -> Tensor:
        """Map hidden states `[T, H]` to `[T, H]`.

        Args:
            hidden_states: `[T, H]`.
            expert_ids: the router's choice, `[T, K]`.
            router_weights: `[T, K]`, applied once, to base and delta together.
        """
        stack, base = self.stack, self.base
        num_choices = expert_ids.shape[-1]
        order = order_by_expert(expert_ids, stack.shape.num_experts)
        gate_up = base.up(hidden_states, order, num_choices)
        aligned = self._align(gate_up, expert_ids)
        if aligned is not None:
            self._add_up(gate_up, hidden_states, aligned)
        inner = base.activate(gate_up)
        out = base.down(inner, order)
        if aligned is not None:
            moe_lora_(out, inner, stack.w2, aligned, backend=stack.backend)
        return base.combine(out, router_weights, hidden_states.dtype)

    def _align(self, gate_up: Tensor, expert_ids: Tensor) -> ExpertRouting | None:
        """Return the step's pairs of adapter and expert; None when there is nothing to add."""
        stack = self.stack
        routing = stack.cell.active
        if routing is None or stack.is_idle:
            return None
        checked = check_rows(stack.path, routing, gate_up, expert_ids.shape[0])
        return align_experts(checked, expert_ids, num_experts=stack.shape.num_experts)

    def _add_up(self, gate_up: Tensor, x: Tensor, aligned: ExpertRouting) -> None:
        """Add the delta of gate and up, `[S, 2 F]`, in the base's own order of the two."""
        stack = self.stack
        if not stack.shape.is_interleaved:
            moe_lora_(gate_up, x, stack.w13, aligned, backend=stack.backend)
            return
        halves = moe_lora_(
            gate_up.new_zeros(gate_up.shape), x, stack.w13, aligned, backend=stack.backend
        )
        gate_up.view(gate_up.shape[0], -1, 2).add_(halves.view(gate_up.shape[0], 2, -1).mT)
