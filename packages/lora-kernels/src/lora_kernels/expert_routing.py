"""ExpertRouting: which (slot, expert) each chosen expert of a step's adapter tokens runs through.

Knows tokens, slots and experts by number only. The router's choice differs from layer to layer,
so it is built once a layer, from the step's routing, and shared by both stages of the experts.

Letters: `T` tokens, `K` experts per token, `X` experts, `E` routing entries, `N` slots,
`M = E * K` pairs at most, `G = min(M, N * X)` groups at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from lora_kernels.errors import KernelArgumentError, UnsupportedShapeError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from lora_kernels.routing import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroup:
    """A run of pairs that share slot and expert."""

    slot: int
    """Slot in `0..N-1`."""

    expert: int
    """Expert in `0..X-1`."""

    start: int
    """First pair."""

    end: int
    """One past the last pair."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertRouting:
    """The pairs (entry, chosen expert) of one layer, sorted by slot, expert, entry, choice.

    Pairs whose expert is not here are left out: they come after the last group, so that the
    sizes of all tensors follow from the shapes alone and no device has to be waited for.

    The constructor trusts its arguments; `align_experts` checks its own.
    """

    pair_idx: Tensor
    """The pairs in their sorted order, `[M]` int64: pair `e * K + k` is choice `k` of entry `e`."""

    pair_rows: Tensor
    """Row `t * K + k` of each sorted pair in the experts' output, `[M]` int64."""

    scales: Tensor
    """Factor of each sorted pair's entry, `[M]` float32."""

    group_indptr: Tensor
    """Bounds of the groups, `[G + 1]` int64: group `g` is `group_indptr[g]:group_indptr[g + 1]`.

    Groups beyond those present are empty. The last bound is the number of pairs that count.
    """

    group_keys: Tensor
    """`slot * X + expert` of each group, `[G]` int64, growing; 0 for those beyond the present."""

    local_ids: Tensor
    """The router's choice in `0..X-1`, `[T, K]` int64; -1 where the expert is not here."""

    routing: Routing
    """The entries of the step."""

    num_experts: int
    """`X`: experts held here."""

    num_choices: int
    """`K`: experts per token."""

    @property
    def num_rows(self) -> int:
        """`T * K`: rows of the experts' output."""
        return self.routing.num_tokens * self.num_choices

    @property
    def num_slots(self) -> int:
        """`N`."""
        return self.routing.num_slots

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.pair_idx.device

    @cached_property
    def groups(self) -> tuple[ExpertGroup, ...]:
        """The groups present, on the host: waits for the device."""
        bounds, keys = self.group_indptr.tolist(), self.group_keys.tolist()
        return tuple(
            [
                ExpertGroup(
                    slot=key // self.num_experts,
                    expert=key % self.num_experts,
                    start=start,
                    end=end,
                )
                for key, start, end in zip(keys, bounds, bounds[1:], strict=False)
                if end > start
            ]
        )

    @cached_property
    def num_pairs(self) -> int:
        """Pairs that count, on the host: waits for the device."""
        return int(self.group_indptr[-1])

    @cached_property
    def derived(self) -> dict[Hashable, Any]:
        """What a backend has worked out for this layer and keeps for the second stage."""
        return {}

    def __repr__(self) -> str:
        return (
            f"ExpertRouting(num_tokens={self.routing.num_tokens}, num_choices={self.num_choices}, "
            f"num_experts={self.num_experts}, num_slots={self.num_slots}, "
            f"device='{self.device}')"
        )


def align_experts(
    routing: Routing, expert_ids: Tensor, *, num_experts: int, expert_offset: int = 0
) -> ExpertRouting:
    """Sort the chosen experts of a step's adapter tokens by slot and expert.

    Tokens without entry have no pairs. An id outside `expert_offset..expert_offset + X - 1` has
    none either: its expert lives in another process (expert parallel), or the router marked the
    choice as empty. Nothing here waits for a device.

    Args:
        routing: the step's entries.
        expert_ids: the router's choice, `[T, K]` int64 or int32, global numbers.
        num_experts: `X`, experts held here.
        expert_offset: global number of the first of them.

    Raises:
        UnsupportedShapeError: `expert_ids` is not `[T, K]`.
        KernelArgumentError: the ids are not integers or on another device, or a number of experts
            or an offset is impossible.
    """
    _check_ids(routing, expert_ids, num_experts, expert_offset)
    ids = expert_ids.long()
    is_local = (ids >= expert_offset).logical_and_(ids < expert_offset + num_experts)
    local_ids = torch.where(is_local, ids - expert_offset, -1)
    num_choices = ids.shape[1]
    tokens, slots = _entries(routing)
    entry_ids = local_ids.index_select(0, tokens)
    beyond = routing.num_slots * num_experts  # the key of pairs that do not count, sorted last
    keys = torch.add(entry_ids, slots[:, None], alpha=num_experts)
    keys.masked_fill_((entry_ids < 0).logical_or_(slots[:, None] < 0), beyond)
    pair_keys, pair_idx = torch.sort(keys.flatten(), stable=True)
    pair_entries = torch.div(pair_idx, num_choices, rounding_mode="floor")
    shift = tokens[pair_entries].sub_(pair_entries).mul_(num_choices)
    group_indptr, group_keys = _bounds(pair_keys, beyond)
    return ExpertRouting(
        pair_idx=pair_idx,
        pair_rows=pair_idx + shift,  # e * K + k  ->  t * K + k
        scales=routing.scales[pair_entries],
        group_indptr=group_indptr,
        group_keys=group_keys,
        local_ids=local_ids,
        routing=routing,
        num_experts=num_experts,
        num_choices=num_choices,
    )


def _entries(routing: Routing) -> tuple[Tensor, Tensor]:
    """Return token and slot of each entry, `[E]` int64 both; the slot of padding is -1."""
    if routing.device.type == "cpu" and not routing.is_padded:
        return routing.token_idx, routing.entry_slots
    # Those of the tables are on the device already, without waiting for it.
    return routing.tables.entry_tokens.long(), routing.tables.entry_slots.long()


def _bounds(pair_keys: Tensor, beyond: int) -> tuple[Tensor, Tensor]:
    """Return bounds and keys of the runs of equal sorted keys below `beyond`, in fixed sizes."""
    num_pairs = pair_keys.shape[0]
    num_groups = min(num_pairs, beyond)
    opens = torch.ones_like(pair_keys)
    opens[1:] = pair_keys[1:] != pair_keys[:-1]
    # The pairs beyond are at the end: they get the group after the last one, or are past `G`.
    pair_groups = opens.cumsum_(0).sub_(1)
    pair_groups.masked_fill_(pair_keys == beyond, num_groups)
    wanted = torch.arange(num_groups + 1, device=pair_keys.device)
    indptr = torch.searchsorted(pair_groups, wanted)
    group_keys = pair_keys.new_zeros(num_groups + 1).scatter_(0, pair_groups, pair_keys)
    return indptr, group_keys[:num_groups]


def _check_ids(routing: Routing, expert_ids: Tensor, num_experts: int, expert_offset: int) -> None:
    if expert_ids.ndim != 2 or expert_ids.shape[0] != routing.num_tokens:  # noqa: PLR2004 - [T, K]
        raise UnsupportedShapeError(
            f"align_experts: expert_ids is {list(expert_ids.shape)}, "
            f"expected [{routing.num_tokens}, K]"
        )
    if expert_ids.dtype not in (torch.int64, torch.int32):
        raise KernelArgumentError(
            f"align_experts: expert_ids is {expert_ids.dtype}, expected int64 or int32"
        )
    if expert_ids.shape[1] < 1 or num_experts < 1 or expert_offset < 0:
        raise KernelArgumentError(
            f"align_experts: K={expert_ids.shape[1]}, num_experts={num_experts}, "
            f"expert_offset={expert_offset}, expected at least one expert from 0 on"
        )
    if expert_ids.device != routing.device:
        raise KernelArgumentError(
            f"align_experts: expert_ids is on {expert_ids.device}, routing on {routing.device}"
        )
