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

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from lora_kernels.routing import Routing


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertRouting:
    """The pairs (entry, chosen expert) of one layer, sorted by slot, expert, entry, choice.

    Pairs whose expert is not here are left out: they come after the last group, so that the
    sizes of all tensors follow from the shapes alone and no device has to be waited for.

    The constructor trusts its arguments; build it with `align_experts`, which checks them.
    """

    pair_idx: Tensor
    """The pairs in their sorted order, `[M]` int64: pair `e * K + k` is choice `k` of entry `e`."""

    pair_keys: Tensor
    """`slot * X + expert` of each sorted pair, `[M]` int64, growing; `N * X` or more at the end."""

    pair_rows: Tensor
    """Row `t * K + k` of each sorted pair in the experts' output, `[M]` int64."""

    scales: Tensor
    """Factor of each sorted pair's entry, `[M]` float32."""

    local_ids: Tensor
    """The router's choice in `0..X-1`, or `N * X` where the expert is not here, `[T, K]` int64,
    contiguous."""

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
    def groups(self) -> tuple[Tensor, Tensor]:
        """Bounds and keys of the groups, in sizes that follow from the shapes alone.

        Bounds are `[G + 1]` int64: group `g` is the sorted pairs `bounds[g]:bounds[g + 1]`. Keys
        are `slot * X + expert`, `[G]` int64. Groups beyond those present are empty, with key 0;
        the last bound is the number of pairs that count.
        """
        return _bounds(self.pair_keys, self.num_slots * self.num_experts)

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


def sort_pairs(
    routing: Routing, expert_ids: Tensor, *, num_experts: int, expert_offset: int
) -> ExpertRouting:
    """Return the pairs of a layer for checked arguments: see `align_experts`."""
    beyond = routing.num_slots * num_experts  # not below any key of a pair that counts
    ids = expert_ids.long().contiguous()  # kernels index the rows of `local_ids`
    local_ids = ids - expert_offset if expert_offset else ids
    is_remote = local_ids.clamp(0, num_experts - 1) != local_ids
    local_ids = local_ids.masked_fill(is_remote, beyond)
    num_choices = ids.shape[1]
    entry_rows, entry_keys, scales = _pairs_of(routing, num_choices, num_experts)
    choices = local_ids.flatten().index_select(0, entry_rows)
    pair_keys, pair_idx = torch.sort(entry_keys.add(choices), stable=True)
    return ExpertRouting(
        pair_idx=pair_idx,
        pair_keys=pair_keys,
        pair_rows=entry_rows.index_select(0, pair_idx),
        scales=scales if routing.has_unit_scales else scales.index_select(0, pair_idx),
        local_ids=local_ids,
        routing=routing,
        num_experts=num_experts,
        num_choices=num_choices,
    )


def _pairs_of(
    routing: Routing, num_choices: int, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, `slot * X` and scale of each pair in the order of the entries, `[E * K]` each.

    The same in every layer, so they are kept on the routing.
    """
    key = ("pairs", num_choices, num_experts)
    found: tuple[Tensor, Tensor, Tensor] | None = routing.derived.get(key)
    if found is None:
        tokens, slots = _entries(routing)
        rows = tokens[:, None] * num_choices + torch.arange(num_choices, device=tokens.device)
        # A slot of -1 is padding.
        keys = (slots * num_experts).masked_fill_(slots < 0, routing.num_slots * num_experts)
        found = (
            rows.flatten(),
            keys.repeat_interleave(num_choices),
            routing.scales.repeat_interleave(num_choices),
        )
        if not routing.is_padded:  # the content of a padded routing changes under its addresses
            routing.derived[key] = found
    return found


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
    pair_groups.masked_fill_(pair_keys >= beyond, num_groups)
    wanted = torch.arange(num_groups + 1, device=pair_keys.device)
    indptr = torch.searchsorted(pair_groups, wanted)
    group_keys = pair_keys.new_zeros(num_groups + 1).scatter_(0, pair_groups, pair_keys)
    return indptr, group_keys[:num_groups]
