"""Whole replacements: rows of an adapter that brings its own weight for a module.

Letters: `T` rows, `I` in, `O_p` out of slice `p`, `V` vocabulary, `D` embedding width.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from torch.nn import functional

from lora_weights import FullModule

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from lora_kernels import Routing


class FullModules:
    """The whole replacements of one module or packed group, by slot.

    Unlike pairs they have no buffer of their own in each slot: a head can be as large as all pairs
    together, and few adapters bring one. They are held while their adapter is in a slot; on a CPU
    they are the tensors of the host tier themselves.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        ends = list(accumulate(sizes))
        self._ranges = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self._device = device
        self._by_slot: dict[int, tuple[FullModule | None, ...]] = {}

    def write(self, slot: int, fulls: Sequence[FullModule | None]) -> None:
        """Hold the replacements of a slot, `P` of them or none."""
        self._by_slot.pop(slot, None)
        if any(fulls):
            self._by_slot[slot] = tuple(full and _move(full, self._device) for full in fulls)

    def reset(self, slot: int) -> None:
        """Let the replacements of a slot go."""
        self._by_slot.pop(slot, None)

    def replace_outputs_(self, y: Tensor, x: Tensor, routing: Routing) -> None:
        """Write `x W^T + b` over the rows of adapters that bring their own weight.

        Args:
            y: base outputs with deltas, `[T, sum O_p]`, written in place.
            x: inputs, `[T, I]`.
            routing: the step's entries.
        """
        for fulls, rows in self.touched(routing):
            for full, (start, end) in zip(fulls, self._ranges, strict=True):
                if full is not None:
                    y[rows, start:end] = functional.linear(x[rows], full.weight, full.bias)

    def replace_rows_(self, y: Tensor, token_ids: Tensor, routing: Routing) -> None:
        """Write `W[id]` over the rows of adapters that bring their own embedding.

        Args:
            y: base outputs with deltas, `[T, D]`, written in place.
            token_ids: `[T]`.
            routing: the step's entries.
        """
        for (full,), rows in self.touched(routing):
            assert full is not None
            y[rows] = functional.embedding(token_ids[rows], full.weight)

    def touched(
        self, routing: Routing
    ) -> list[tuple[tuple[FullModule | None, ...], slice | Tensor]]:
        """Return the replacements this step uses, `P` at a time, with the rows each is for."""
        if not self._by_slot:
            return []
        found: list[tuple[tuple[FullModule | None, ...], slice | Tensor]] = []
        for segment in routing.segments:
            if segment.slot in self._by_slot and segment.end > segment.start:
                first, count = segment.first_token, segment.end - segment.start
                rows = (
                    routing.token_idx[segment.start : segment.end]
                    if first is None
                    else slice(first, first + count)
                )
                found.append((self._by_slot[segment.slot], rows))
        return found


def _move(full: FullModule, device: torch.device) -> FullModule:
    bias = None if full.bias is None else full.bias.to(device)
    return FullModule(weight=full.weight.to(device), bias=bias)
