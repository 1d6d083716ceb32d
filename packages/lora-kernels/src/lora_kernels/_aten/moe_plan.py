"""How the groups of an expert layer are put together into few products.

A group is a run of pairs that read the same weights. A product over one group reads the weights
where they are; a batched product over several reads them once into a batch, padded to the largest
of them. Groups of like size are batched while copying and padding cost less than another call.

Letters: `M` pairs, `N` slots, `X` experts, `R` max rank, `I` in, `O` out, `P` slices, `S` pairs of
the largest group of a bucket, `r` a true rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lora_kernels._aten.costs import costs_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from lora_kernels._aten.costs import Costs
    from lora_kernels.expert_routing import ExpertRouting
    from lora_kernels.expert_weights import ExpertWeights

MAX_BATCH_ELEMENTS = 1 << 22
"""Weight elements copied for one batched product at most, so that a step's memory is bounded."""

# Microseconds to copy a thousand weight elements into a batch, and to start a batched product,
# measured as the constants in `costs.py`, on two cores; right within a factor of two is enough.
_COPY = {torch.bfloat16: 0.1, torch.float32: 0.2}
_BATCHED_CALL = {torch.bfloat16: 60.0, torch.float32: 20.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Pairs `start..end-1` that read the same factor."""

    key: int
    """`slot * X + expert`, or the slot where all experts share the factor."""

    start: int
    """First pair."""

    end: int
    """One past the last pair."""

    ranks: tuple[int, ...]
    """True rank of each slice."""

    @property
    def size(self) -> int:
        """Number of pairs."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Groups of the same ranks that become one product, in the order of their pairs."""

    groups: tuple[Group, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """True rank of each slice, the same in all groups."""
        return self.groups[0].ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the pairs of a bucket are, in the padded batch and in the step."""

    size: int
    """`S`."""

    keys: Tensor
    """Key of each group, `[n]` int64."""

    places: Tensor | None
    """Places of the batch that hold a pair, not padding, `[m]` int64; left out when all do."""

    pairs: Tensor
    """Pair of each of these places, `[m]` int64."""

    padded_pairs: Tensor
    """Pair of every place, `[n * S]` int64; padding repeats the last pair of its group."""


def groups_of(
    weights: ExpertWeights, expert_routing: ExpertRouting, *, is_shared: bool
) -> list[Group]:
    """Return the groups of slots with weights; with a shared factor a slot is one group."""
    groups: list[Group] = []
    for found in expert_routing.groups:
        ranks = weights.slot_ranks[found.slot]
        if not any(ranks):
            continue
        key = found.slot if is_shared else found.slot * weights.num_experts + found.expert
        start = found.start
        if groups and groups[-1].key == key:
            start = groups.pop().start
        groups.append(Group(key=key, start=start, end=found.end, ranks=ranks))
    return groups


def shrink_buckets(
    groups: Iterable[Group], weights: ExpertWeights, dtype: torch.dtype
) -> list[Bucket]:
    """Put groups together for products with A in `dtype`."""
    elements = weights.num_slices * weights.in_features
    return _buckets(groups, elements, weights.in_features, dtype)


def expand_buckets(
    groups: Iterable[Group], weights: ExpertWeights, dtype: torch.dtype
) -> list[Bucket]:
    """Put groups together for products with B in `dtype`."""
    return _buckets(groups, weights.total_out_features, weights.total_out_features, dtype)


def _buckets(
    groups: Iterable[Group], elements_per_rank: int, row_elements: int, dtype: torch.dtype
) -> list[Bucket]:
    costs, call = costs_of(dtype), _BATCHED_CALL[dtype]
    by_ranks: dict[tuple[int, ...], list[Group]] = {}
    for group in groups:
        by_ranks.setdefault(group.ranks, []).append(group)
    buckets = []
    for ranks, alike in by_ranks.items():
        elements = max(ranks) * elements_per_rank
        row_cost = (elements * costs.product_mac + row_elements * costs.product_out) / 1e3
        copy_pays = elements * _COPY[dtype] / 1e3 < call
        limit = max(1, MAX_BATCH_ELEMENTS // elements) if copy_pays else 1
        buckets += _cut(sorted(alike, key=_by_size), row_cost, call, limit)
    return buckets


def _by_size(group: Group) -> int:
    return -group.size


def _cut(groups: Sequence[Group], row_cost: float, call: float, limit: int) -> list[Bucket]:
    """Cut groups, largest first, where their padding costs more than another call."""
    cuts, waste, first = [0], 0.0, 0
    for i, group in enumerate(groups):
        waste += (groups[first].size - group.size) * row_cost
        if waste > call or i - first == limit:
            cuts.append(i)
            first, waste = i, 0.0
    ends = [*cuts[1:], len(groups)]
    return [
        Bucket(groups=tuple(sorted(groups[i:j], key=lambda group: group.start)))
        for i, j in zip(cuts, ends, strict=True)
    ]


def lay_out(bucket: Bucket, device: torch.device) -> Layout:
    """Return the index tensors of a bucket."""
    groups = bucket.groups
    sizes = [group.size for group in groups]
    columns = [[g.key for g in groups], [g.start for g in groups], sizes]
    keys, starts, sizes_n = torch.tensor(columns, device=device).unbind()
    size = max(sizes)
    place_S = torch.arange(size, device=device)
    if min(sizes) == size:
        pairs = (starts[:, None] + place_S).flatten()
        return Layout(size=size, keys=keys, places=None, pairs=pairs, padded_pairs=pairs)
    padded = (starts[:, None] + torch.minimum(place_S, sizes_n[:, None] - 1)).flatten()
    places = (place_S < sizes_n[:, None]).flatten().nonzero().squeeze(1)
    pairs = padded.index_select(0, places)
    return Layout(size=size, keys=keys, places=places, pairs=pairs, padded_pairs=padded)


def split_bags(
    groups: Sequence[Group], weights: ExpertWeights, dtype: torch.dtype
) -> tuple[list[Group], list[Group]]:
    """Say which groups sum rows of B, pair by pair, and which multiply with it."""
    costs = costs_of(dtype)
    bags = [_bag_cost(group, weights, costs) for group in groups]
    products = [_product_cost(group, weights, costs, _COPY[dtype]) for group in groups]
    is_bag = [bag < product for bag, product in zip(bags, products, strict=True)]
    call = weights.num_slices * _BATCHED_CALL[dtype]
    mixed = costs.bag + call + sum(map(min, bags, products))
    all_bags, all_products = costs.bag + sum(bags), call + sum(products)
    if all_bags <= min(mixed, all_products):
        return list(groups), []
    if all_products <= mixed:
        return [], list(groups)
    in_bags = [group for group, choice in zip(groups, is_bag, strict=True) if choice]
    return in_bags, [group for group, choice in zip(groups, is_bag, strict=True) if not choice]


def _bag_cost(group: Group, weights: ExpertWeights, costs: Costs) -> float:
    outputs = group.size * weights.total_out_features / 1e3
    return outputs * (
        costs.bag_out + max(group.ranks) * (costs.bag_mac + costs.bag_piece / weights.chunk)
    )


def _product_cost(group: Group, weights: ExpertWeights, costs: Costs, copy: float) -> float:
    elements = max(group.ranks) * weights.total_out_features / 1e3
    outputs = group.size * weights.total_out_features / 1e3
    # The outputs of a batched product are written, selected and added: three times in all.
    return elements * (copy + group.size * costs.product_mac) + 3 * outputs * costs.product_out
