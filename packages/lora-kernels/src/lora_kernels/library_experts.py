"""The expert operators registered with `torch.library`: see `library`.

The router's choice is made inside the graph, so that aligning is an operator too: its results have
sizes that follow from the shapes alone.

Letters: `T` tokens, `K` experts per token, `X` experts, `M` pairs, `E` entries, `N` slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lora_kernels import dispatch
from lora_kernels.backend import Backend
from lora_kernels.expert_checks import check_expert_ids, check_experts, check_tensors
from lora_kernels.expert_routing import ExpertRouting, sort_pairs
from lora_kernels.expert_weights import ExpertWeights
from lora_kernels.library import MEMO, are_same, rebuild_routing, register, routing_arguments
from lora_kernels.tables import TABLE_NAMES

if TYPE_CHECKING:
    from torch import Tensor

_ROUTING = "Tensor[] routing, int num_slots, int padded_tile"
_LAYER = (
    f"Tensor[] weights, int[] out_features, int num_experts, Tensor[] pairs, {_ROUTING}, "
    "str backend"
)


def layer_arguments(
    weights: ExpertWeights, expert_routing: ExpertRouting, backend: Backend
) -> tuple[list[Tensor], list[int], int, list[Tensor], list[Tensor], int, int, str]:
    """Return what the registered operator takes for weights and expert routing."""
    pairs = [
        expert_routing.pair_idx,
        expert_routing.pair_keys,
        expert_routing.pair_rows,
        expert_routing.scales,
        expert_routing.local_ids,
    ]
    return (
        [weights.a_storage, weights.b_storage, weights.rank_table],
        list(weights.out_features),
        weights.num_experts,
        pairs,
        *routing_arguments(expert_routing.routing),
        backend.value,
    )


def _align_experts(expert_ids: Tensor, entries: list[Tensor], *numbers: int) -> tuple[Tensor, ...]:
    num_slots, padded_tile, num_experts, expert_offset = numbers
    for_kernels = len(entries) > len(TABLE_NAMES)  # the tables are there: no need to wait
    routing = rebuild_routing(entries, num_slots, padded_tile, for_kernels=for_kernels)
    check_expert_ids(routing, expert_ids, num_experts, expert_offset)
    found = sort_pairs(routing, expert_ids, num_experts=num_experts, expert_offset=expert_offset)
    # Scales may be the routing's own; a result must have memory of its own.
    scales = found.scales.clone()
    return found.pair_idx, found.pair_keys, found.pair_rows, scales, found.local_ids


def _align_experts_fake(
    expert_ids: Tensor, entries: list[Tensor], *_numbers: int
) -> tuple[Tensor, ...]:
    num_pairs = entries[1].shape[0] * expert_ids.shape[1]
    index = expert_ids.new_empty((num_pairs,), dtype=torch.int64)
    return (
        index,
        torch.empty_like(index),
        torch.empty_like(index),
        torch.empty_like(index, dtype=torch.float32),
        torch.empty_like(expert_ids, dtype=torch.int64, memory_format=torch.contiguous_format),
    )


def _moe_lora_(y: Tensor, x: Tensor, router_weights: Tensor | None, *layer: Any) -> None:
    factors, out_features, num_experts, pairs, entries, num_slots, padded_tile, name = layer
    backend = Backend(name)
    for_kernels = backend is Backend.TRITON
    weights = _rebuild_weights(factors, out_features, num_experts, needs_host=not for_kernels)
    expert_routing = _rebuild_pairs(
        pairs, (entries, num_slots, padded_tile), num_experts, for_kernels=for_kernels
    )
    check_experts(expert_routing, weights)
    check_tensors(y, x, router_weights, weights, expert_routing)
    if not expert_routing.routing.is_empty:
        dispatch.moe_lora_(y, x, weights, expert_routing, router_weights, backend=backend)


def _rebuild_weights(
    factors: list[Tensor], out_features: list[int], num_experts: int, *, needs_host: bool
) -> ExpertWeights:
    a_storage, b_storage, rank_table = factors
    weights: ExpertWeights | None = getattr(a_storage, MEMO, None)
    if weights is None or not are_same([weights.b_storage], [b_storage]):
        # Of detached tensors: a tensor that held itself would outlive its last user.
        weights = ExpertWeights(a_storage.detach(), b_storage.detach(), out_features, num_experts)
        setattr(a_storage, MEMO, weights)
    weights.rank_table = rank_table
    if needs_host:
        weights.slot_ranks = [tuple(row) for row in rank_table.tolist()]
    return weights


def _rebuild_pairs(
    pairs: list[Tensor],
    routing: tuple[list[Tensor], int, int],
    num_experts: int,
    *,
    for_kernels: bool,
) -> ExpertRouting:
    made: tuple[list[Tensor], ExpertRouting] | None = getattr(pairs[0], MEMO, None)
    if made is not None and are_same(made[0], [*pairs, *routing[0]]):
        return made[1]
    kept = [tensor.detach() for tensor in pairs]
    pair_idx, pair_keys, pair_rows, scales, local_ids = kept
    expert_routing = ExpertRouting(
        pair_idx=pair_idx,
        pair_keys=pair_keys,
        pair_rows=pair_rows,
        scales=scales,
        local_ids=local_ids,
        routing=rebuild_routing(*routing, for_kernels=for_kernels),
        num_experts=num_experts,
        num_choices=local_ids.shape[1],
    )
    setattr(pairs[0], MEMO, ([*kept, *(t.detach() for t in routing[0])], expert_routing))
    return expert_routing


register(
    "align_experts",
    f"(Tensor expert_ids, {_ROUTING}, int num_experts, int expert_offset) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _align_experts,
    _align_experts_fake,
)
register(
    "moe_lora_",
    f"(Tensor(a!) y, Tensor x, Tensor? router_weights, {_LAYER}) -> ()",
    _moe_lora_,
    lambda *_arguments: None,
)
