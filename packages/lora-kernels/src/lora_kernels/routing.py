"""Routing: which adapter slots apply to which tokens of a step, the metadata all operators read.

Knows slots and tokens by number only: nothing of adapters, requests or models.

Letters: `T` tokens of the step, `E` entries, `G` segments, `N` slots, `U` tokens with an entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from lora_kernels.tables import build_tables

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from lora_kernels.tables import KernelTables


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of entries that share a slot."""

    slot: int
    """Slot in `0..N-1`."""

    start: int
    """First entry."""

    end: int
    """One past the last entry; equal to `start` in an empty segment."""

    first_token: int | None
    """Set when the tokens are `first_token, first_token + 1, ...` in the order of the entries."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """The entries (token, slot, scale) of one step, sorted by slot, then by token.

    A token without adapter has no entry, a token with a weighted set has several. Build it once a
    step with `build_routing` and share it by reference with every layer: what a backend derives
    from it is kept here, so that only the first layer pays for it (one thread at a time).

    The constructor trusts its arguments; `build_routing`, `route_tokens`, `route_runs` and
    `Routing.from_segments` check theirs.
    """

    token_idx: Tensor
    """Token of each entry, `[E]` int64."""

    scales: Tensor
    """Factor of each entry, `[E]` float32."""

    seg_indptr: Tensor
    """Bounds of the segments, `[G + 1]` int64: segment `g` is `seg_indptr[g]:seg_indptr[g + 1]`."""

    seg_slots: Tensor
    """Slot of each segment, `[G]` int64, strictly growing."""

    token_extent: Tensor
    """`[T, 0]`: `T` once more, as a shape. Compiled code would be made anew for each `num_tokens`,
    but takes a shape that changes."""

    num_tokens: int
    """`T`: rows of the activations of this step."""

    num_slots: int
    """`N`: slots of the stacked weights this routing is for."""

    segments: tuple[Segment, ...]
    """The segments again, on the host, for backends that loop over them."""

    has_unit_scales: bool
    """Every scale is exactly 1, so that multiplying by it can be left out."""

    has_repeated_tokens: bool
    """Some token has several entries."""

    mixed_slots: frozenset[int]
    """Slots of which some entry is scaled, or shares its token with another entry."""

    tile: int
    """Entries or rows a program of the GPU kernels takes: 1 (BGMV), 16 or 64 (SGMV)."""

    device_tables: KernelTables | None = None
    """Made on the host and copied along where the routing is for a GPU; see `tables`."""

    is_padded: bool = False
    """A view of `RoutingBuffers`: shapes are upper bounds, and nothing is known on the host."""

    @classmethod
    def from_segments(
        cls,
        *,
        token_idx: Tensor,
        scales: Tensor,
        seg_indptr: Tensor,
        seg_slots: Tensor,
        num_tokens: int,
        num_slots: int,
        device: torch.device | str = "cpu",
    ) -> Routing:
        """Build from entries that are sorted already; segments may be empty.

        Args:
            token_idx: token of each entry, `[E]` int64, on the CPU, growing within a segment.
            scales: factor of each entry, `[E]` float32, on the CPU.
            seg_indptr: bounds of the segments, `[G + 1]` int64, on the CPU.
            seg_slots: slot of each segment, `[G]` int64, strictly growing, on the CPU.
            num_tokens: tokens of the step.
            num_slots: slots of the stacked weights.
            device: where the operators will run; reached by one copy without synchronisation.

        Raises:
            KernelArgumentError: bounds, slots or tokens are out of range or out of order.
        """
        from lora_kernels.build import check_sorted, routing_of_sorted

        tensors = (token_idx, scales, seg_indptr, seg_slots)
        check_sorted(*tensors, num_tokens=num_tokens, num_slots=num_slots)
        return routing_of_sorted(
            *tensors, num_tokens=num_tokens, num_slots=num_slots, device=torch.device(device)
        )

    @property
    def num_entries(self) -> int:
        """`E`."""
        return self.token_idx.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.token_idx.device

    @cached_property
    def is_empty(self) -> bool:
        """No token has an adapter: every operator returns at once."""
        return self.token_idx.shape[0] == 0

    @cached_property
    def tables(self) -> KernelTables:
        """What the GPU kernels look up, on the device of the routing."""
        if self.device_tables is not None:
            return self.device_tables
        tensors = (self.token_idx, self.scales, self.seg_indptr, self.seg_slots)
        return build_tables(
            *tensors, num_slots=self.num_slots, has_repeated_tokens=self.has_repeated_tokens
        )

    @cached_property
    def entry_slots(self) -> Tensor:
        """Slot of each entry, `[E]` int64."""
        return self.seg_slots[self.entry_segments]

    @cached_property
    def entry_segments(self) -> Tensor:
        """Segment of each entry, `[E]` int64."""
        return torch.repeat_interleave(self.seg_indptr.diff())

    @cached_property
    def touched_tokens(self) -> Tensor:
        """Tokens with at least one entry, `[U]` int64, growing."""
        touched: Tensor = torch.unique(self.token_idx)
        return touched

    @cached_property
    def touched_range(self) -> tuple[int, int]:
        """First token with an entry, and the number of tokens from it to the last one."""
        first, last = int(self.touched_tokens[0]), int(self.touched_tokens[-1])
        return first, last - first + 1

    @cached_property
    def is_touched_run(self) -> bool:
        """Every token of `touched_range` has an entry, so that its rows are a view."""
        return self.touched_range[1] == self.touched_tokens.shape[0]

    @cached_property
    def entry_rows(self) -> Tensor:
        """Position of each entry's token in `touched_tokens`, `[E]` int64."""
        return torch.searchsorted(self.touched_tokens, self.token_idx)

    @cached_property
    def derived(self) -> dict[Hashable, Any]:
        """What a backend has worked out for this routing and keeps for the next layers."""
        return {}

    def __repr__(self) -> str:
        return (
            f"Routing(num_tokens={self.num_tokens}, num_entries={self.num_entries}, "
            f"slots={[segment.slot for segment in self.segments]}, num_slots={self.num_slots}, "
            f"device='{self.device}')"
        )
