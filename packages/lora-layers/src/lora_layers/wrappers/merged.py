"""LoraMerged: a module with a weight matrix that it uses in a way of its own, such as a router.

Letters: `T` rows, `I` in, `O` out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lora_layers.wrappers.base import LoraModule, SlotStack, check_rows

if TYPE_CHECKING:
    from lora_kernels import Routing

MATRIX_DIMS = 2

Outputs: TypeAlias = Tensor | tuple[Tensor, ...]
"""What such a module returns: tensors whose first dimension counts the rows."""

WeightedSlots: TypeAlias = tuple[tuple[int, float], ...]
"""(slot, scale) of each adapter of a row."""


def holds_one_matrix(module: nn.Module) -> bool:
    """Whether the module's only parameters are `weight [O, I]` and perhaps a bias `[O]`."""
    own = dict(module.named_parameters())
    weight = own.pop("weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != MATRIX_DIMS:
        return False
    return all(name == "bias" and value.ndim == 1 for name, value in own.items())


class LoraMerged(LoraModule):
    """Runs the rows of each adapter with `W + scale * B A` in the place of `W`.

    For modules that do more with their product than return it (a router picks experts), so that
    a delta cannot be added to the output. The weights are small; each set of adapters in the step
    costs one call of the base module.
    """

    stack: SlotStack

    def __init__(self, base_layer: nn.Module, stack: SlotStack) -> None:
        """Take the place of `base_layer`, which treats every row of `[T, I]` by itself."""
        super().__init__(base_layer)
        object.__setattr__(self, "stack", stack)

    def forward(self, x: Tensor) -> Outputs:
        """Map `[..., I]` to what the base module returns, `[T, ...]` each."""
        routing = self.stack.cell.active
        if routing is None or self.stack.is_idle:
            return cast("Outputs", self.base_layer(x))
        rows = x.reshape(-1, x.shape[-1])
        outputs: list[Tensor] = list(_as_tuple(self.base_layer(rows)))
        checked = check_rows(self.stack.path, routing, outputs[0], rows.shape[0])
        for slots, token_idx in rows_by_set(checked).items():
            weight = self._merge(slots)
            if weight is None:
                continue
            part = functional_call(self.base_layer, {"weight": weight}, (rows[token_idx],))
            # Out of place: what the base returned may be views of one another.
            outputs = [
                whole.index_copy(0, token_idx, own)
                for whole, own in zip(outputs, _as_tuple(part), strict=True)
            ]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _merge(self, slots: WeightedSlots) -> Tensor | None:
        """Return the weight for a set of adapters; None when none of them changes it."""
        weights = self.stack.weights
        base = self.base_layer.weight
        assert isinstance(base, Tensor)
        present = [(s, scale) for s, scale in slots if weights.slot_ranks[s][0]]
        if not present:
            return None
        merged = base.float()
        for slot, scale in present:
            rank = weights.slot_ranks[slot][0]
            lora_a, lora_b = weights.lora_a[0][slot, :rank], weights.lora_b[0][slot, :, :rank]
            merged = torch.addmm(merged, lora_b.float(), lora_a.float(), alpha=scale)
        return merged.to(base.dtype)


def rows_by_set(routing: Routing) -> dict[WeightedSlots, Tensor]:
    """Group the rows with adapters by what they use; kept on the routing for the next layers.

    Returns:
        Set -> row numbers, int64, growing.
    """
    groups: dict[WeightedSlots, Tensor] | None = routing.derived.get(rows_by_set)
    if groups is None:
        sets: dict[int, list[tuple[int, float]]] = {}
        entries = zip(
            routing.token_idx.tolist(),
            routing.entry_slots.tolist(),
            routing.scales.tolist(),
            strict=True,
        )
        for token, slot, scale in entries:
            sets.setdefault(token, []).append((slot, scale))
        tokens: dict[WeightedSlots, list[int]] = {}
        for token in sorted(sets):
            tokens.setdefault(tuple(sets[token]), []).append(token)
        groups = {key: torch.tensor(rows, device=routing.device) for key, rows in tokens.items()}
        routing.derived[rows_by_set] = groups
    return groups


def _as_tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
