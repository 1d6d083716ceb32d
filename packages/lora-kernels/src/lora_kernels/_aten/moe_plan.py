"""How the groups of an expert layer are put together into few products.

A group is a run of pairs that read the same factor. A product over one group reads the factor
where it is; a batched product over several reads each once into a batch, padded to the largest of
them. Groups of like size are batched while copying and padding cost less than another call.

Letters: `M` pairs, `G` groups, `N` slots, `X` experts, `R` max rank, `I` in, `O` out, `S` pairs of
the largest group of a bucket, `n` groups of a bucket, `m` pairs of a bucket, `r` a true rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lora_kernels.expert_routing import ExpertRouting
    from lora_kernels.expert_weights import ExpertWeights

Ranks = tuple[int, ...]
"""True rank of each slice of a slot."""

MAX_BATCH_ELEMENTS = 1 << 22
"""Weight elements copied for one batched product at most, so that a step's memory is bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """Processor time in microseconds for a thousand of the thing named, to choose between ways.

    Measured on one core of an Intel Xeon (Sapphire Rapids class, AVX-512 and AMX, 2.6 GHz, torch
    2.15) with 64 groups of 8 pairs, rank 8, I = 512 and O = 2048; the candidates differ by more
    than a factor of two wherever the choice matters. What both ways need is left out.
    """

    call: float
    """One batched product, whatever its size (not per thousand)."""

    copy: float
    """Weight elements copied into a batch."""

    mac: float
    """Multiply-adds of a batched product."""

    out: float
    """Outputs of a batched product."""

    bag: float
    """One call of embedding bags, whatever its size (not per thousand)."""

    bag_mac: float
    """Multiply-adds in bags."""


_COSTS = {
    torch.bfloat16: _Costs(call=60, copy=0.1, mac=0.002, out=0.35, bag=20, bag_mac=0.055),
    torch.float32: _Costs(call=20, copy=0.2, mac=0.0125, out=0.25, bag=20, bag_mac=0.13),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """The groups of a layer: by slot and expert or, for a shared factor, by slot."""

    keys: Tensor
    """`slot * X + expert`, or the slot, of each group, `[G]` int64, growing."""

    starts: Tensor
    """First pair of each group, `[G]` int64."""

    sizes: Tensor
    """Pairs of each group, `[G]` int64."""

    host_slots: list[int]
    """Slot of each group."""

    host_starts: list[int]
    """`starts` on the host."""

    host_sizes: list[int]
    """`sizes` on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the pairs of a bucket are, in the padded batch and in the layer."""

    size: int
    """`S`."""

    keys: Tensor
    """Key of each group, `[n]` int64."""

    padded_pairs: Tensor
    """Pair of every place, `[n * S]` int64; padding repeats the last pair of its group."""

    places: Tensor | None
    """Places of the batch that hold a pair, not padding, `[m]` int64; left out when all do."""

    pairs: Tensor
    """Pair of each of these places, `[m]` int64."""


def grouping_of(expert_routing: ExpertRouting, *, is_shared: bool) -> Grouping:
    """Return the groups of pairs that count; made once a layer."""
    key = ("grouping", is_shared)
    found: Grouping | None = expert_routing.derived.get(key)
    if found is None:
        found = expert_routing.derived[key] = _group(expert_routing, is_shared=is_shared)
    return found


def _group(expert_routing: ExpertRouting, *, is_shared: bool) -> Grouping:
    keys, num_experts = expert_routing.pair_keys, expert_routing.num_experts
    if is_shared:
        keys = torch.div(keys, num_experts, rounding_mode="floor")
    keys, sizes = torch.unique_consecutive(keys, return_counts=True)
    host_keys, host_sizes = keys.tolist(), sizes.tolist()
    beyond = expert_routing.num_slots * (1 if is_shared else num_experts)
    num_groups = len(host_keys)
    while num_groups and host_keys[num_groups - 1] >= beyond:
        num_groups -= 1
    return Grouping(
        keys=keys[:num_groups],
        starts=(sizes.cumsum(0) - sizes)[:num_groups],
        sizes=sizes[:num_groups],
        host_slots=[k if is_shared else k // num_experts for k in host_keys[:num_groups]],
        host_starts=[0, *accumulate(host_sizes[:num_groups])][:num_groups],
        host_sizes=host_sizes[:num_groups],
    )


def groups_by_ranks(grouping: Grouping, weights: ExpertWeights) -> dict[Ranks, list[int]]:
    """Return the groups of each list of true ranks; slots without weights are left out."""
    by_ranks: dict[Ranks, list[int]] = {}
    for group, slot in enumerate(grouping.host_slots):
        ranks = weights.slot_ranks[slot]
        if ranks in by_ranks:
            by_ranks[ranks].append(group)
        elif any(ranks):
            by_ranks[ranks] = [group]
    return by_ranks


def shrink_buckets(
    groups: list[int], grouping: Grouping, ranks: Ranks, weights: ExpertWeights, dtype: torch.dtype
) -> list[list[int]]:
    """Put groups of equal ranks together for products with A in `dtype`."""
    width = weights.num_slices * weights.in_features
    return _cut(groups, grouping.host_sizes, max(ranks) * width, weights.in_features, dtype)


def expand_buckets(
    groups: list[int], grouping: Grouping, ranks: Ranks, weights: ExpertWeights, dtype: torch.dtype
) -> list[list[int]]:
    """Put groups of equal ranks together for products with B in `dtype`."""
    width = weights.total_out_features
    return _cut(groups, grouping.host_sizes, max(ranks) * width, width, dtype)


def _cut(
    groups: list[int], sizes: Sequence[int], elements: int, row_elements: int, dtype: torch.dtype
) -> list[list[int]]:
    """Cut groups, largest first, where their padding costs more than another call.

    Args:
        groups: numbers of the groups.
        sizes: pairs of every group of the layer.
        elements: weight elements that a group reads.
        row_elements: elements that a pair reads or writes.
        dtype: of the product.
    """
    costs = _COSTS[dtype]
    row_cost = (elements * costs.mac + row_elements * costs.out) / 1e3
    copy_pays = elements * costs.copy / 1e3 < costs.call
    limit = max(1, MAX_BATCH_ELEMENTS // elements) if copy_pays else 1
    largest = max(sizes[group] for group in groups)
    padding = len(groups) * largest - sum(sizes[group] for group in groups)
    if padding * row_cost <= costs.call and len(groups) <= limit:
        return [groups]
    groups = sorted(groups, key=lambda group: -sizes[group])
    cuts, waste, first = [0], 0.0, 0
    for i, group in enumerate(groups):
        waste += (sizes[groups[first]] - sizes[group]) * row_cost
        if waste > costs.call or i - first == limit:
            cuts.append(i)
            first, waste = i, 0.0
    ends = [*cuts[1:], len(groups)]
    return [sorted(groups[i:j]) for i, j in zip(cuts, ends, strict=True)]


def lay_out(
    bucket: list[int], grouping: Grouping, expert_routing: ExpertRouting, *, is_shared: bool
) -> Layout:
    """Return the index tensors of a bucket; made once a layer, as both stages often share them."""
    key = ("layout", is_shared, *bucket)
    found: Layout | None = expert_routing.derived.get(key)
    if found is None:
        found = expert_routing.derived[key] = _lay_out(bucket, grouping)
    return found


def _lay_out(bucket: list[int], grouping: Grouping) -> Layout:
    keys, starts, sizes = grouping.keys, grouping.starts, grouping.sizes
    if len(bucket) < len(grouping.host_sizes):
        index = torch.tensor(bucket, device=keys.device)
        keys, starts, sizes = (part.index_select(0, index) for part in (keys, starts, sizes))
    host_sizes = [grouping.host_sizes[group] for group in bucket]
    size = max(host_sizes)
    if size == 1:
        return Layout(size=1, keys=keys, padded_pairs=starts, places=None, pairs=starts)
    place_S = torch.arange(size, device=keys.device)
    if min(host_sizes) == size:
        pairs = (starts[:, None] + place_S).flatten()
        return Layout(size=size, keys=keys, padded_pairs=pairs, places=None, pairs=pairs)
    sizes_n1 = sizes[:, None]
    padded = (starts[:, None] + torch.minimum(place_S, sizes_n1 - 1)).flatten()
    places = (place_S < sizes_n1).flatten().nonzero().squeeze(1)
    pairs = padded.index_select(0, places)
    return Layout(size=size, keys=keys, padded_pairs=padded, places=places, pairs=pairs)


def split_bags(
    groups: list[int], grouping: Grouping, ranks: Ranks, weights: ExpertWeights, dtype: torch.dtype
) -> tuple[list[int], list[int]]:
    """Say which groups of equal ranks sum rows of B, pair by pair, and which multiply with it.

    Summing costs in proportion to the pairs; a product also has a price for each group and call.
    """
    costs, width, rank = _COSTS[dtype], weights.total_out_features / 1e3, max(ranks)
    bag_row = width * rank * costs.bag_mac
    product_row = width * (rank * costs.mac + costs.out)
    product_group = width * rank * costs.copy
    call = weights.num_slices * costs.call
    sizes = [grouping.host_sizes[group] for group in groups]
    num_pairs = sum(sizes)
    all_bags = costs.bag + bag_row * num_pairs
    all_products = call + product_group * len(groups) + product_row * num_pairs
    if bag_row <= product_row:
        return groups, []
    limit = product_group / (bag_row - product_row)
    small = [group for group, size in zip(groups, sizes, strict=True) if size <= limit]
    small_pairs = sum(grouping.host_sizes[group] for group in small)
    saved = product_group * len(small) - (bag_row - product_row) * small_pairs
    mixed = all_products + costs.bag - saved
    if all_bags <= min(mixed, all_products):
        return groups, []
    if all_products <= mixed:
        return [], groups
    return small, [group for group, size in zip(groups, sizes, strict=True) if size > limit]
