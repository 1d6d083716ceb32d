"""moe_lora_ as a few batched products of torch and sums of rows, arranged for CPUs.

Works in bfloat16 when x and weights are bfloat16 (products accumulate in float32; the rank-wide
intermediate and the delta are rounded to bfloat16), else in float32.

Letters: `M` pairs, `N` slots, `X` experts, `R` max rank, `I` in, `O` out, `P` slices, `S` pairs of
the largest group of a bucket, `n` groups of a bucket, `m` pairs of a bucket, `C` chunks of the
output, `F` elements of bags: ranks summed over chunks, `r` a true rank, `TK` rows of the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lora_kernels._aten.moe_plan import (
    expand_buckets,
    grouping_of,
    groups_by_ranks,
    lay_out,
    shrink_buckets,
    split_bags,
)
from lora_kernels._aten.plan import compute_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels._aten.moe_plan import Grouping, Layout, Ranks
    from lora_kernels.expert_routing import ExpertRouting
    from lora_kernels.expert_weights import ExpertWeights


def moe_lora_(
    y_TKO: Tensor,
    x_TI: Tensor,
    weights: ExpertWeights,
    expert_routing: ExpertRouting,
    router_weights_TK: Tensor | None,
) -> Tensor:
    """See `lora_kernels.moe_lora_`."""
    grouping = grouping_of(expert_routing, is_shared=weights.is_b_shared)
    by_ranks = groups_by_ranks(grouping, weights)
    if not by_ranks:
        return y_TKO
    dtype = compute_dtype(x_TI.dtype, weights.dtype)
    v_MRP = _shrink(x_TI, weights, expert_routing, dtype)
    _scale_(v_MRP, expert_routing, router_weights_TK)
    target = _target_of(y_TKO, expert_routing, grouping, by_ranks)
    for ranks, groups in by_ranks.items():
        in_bags: list[int] = []
        in_products = groups
        if dtype == weights.dtype:
            in_bags, in_products = split_bags(groups, grouping, ranks, weights, dtype)
        if in_bags:
            pairs = _pairs_of(in_bags, grouping, expert_routing)
            _expand_bags_(target, v_MRP, weights, expert_routing, ranks=ranks, pairs=pairs)
        if in_products:
            for bucket in expand_buckets(in_products, grouping, ranks, weights, dtype):
                layout = lay_out(bucket, grouping, expert_routing, is_shared=weights.is_b_shared)
                _expand_bucket_(target, v_MRP, weights, ranks=ranks, layout=layout)
    return target.finish_()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """Where deltas are added: the output itself, or float32 sums where rows have several pairs."""

    y: Tensor
    """`[TK, O]`, the output."""

    sums: Tensor
    """`[rows, O]`, what is added to: `y`, or float32 copies of the rows with a pair."""

    rows: Tensor
    """Row of `sums` of each pair, `[M]` int64."""

    touched: Tensor | None
    """Rows of `y` that `sums` holds; left out when it is `y`."""

    def add_(self, pairs: Tensor | None, delta: Tensor) -> None:
        """Add `[m, O]` to the rows of some pairs; of all if none are given."""
        rows = self.rows if pairs is None else self.rows.index_select(0, pairs)
        if self.touched is not None:  # rows may repeat
            self.sums.index_add_(0, rows, delta.to(self.sums.dtype))
        elif self.sums.dtype == delta.dtype and self.sums.is_contiguous():
            self.sums.index_add_(0, rows, delta)
        else:
            # Added in the wider dtype and rounded once. Where rows are strided, index_add_ of a
            # 16-bit dtype would rewrite all of them, those of base tokens included.
            self.sums.index_copy_(0, rows, self.sums.index_select(0, rows).add_(delta))

    def finish_(self) -> Tensor:
        """Round sums into the output, and return it."""
        if self.touched is not None:
            self.y.index_copy_(0, self.touched, self.sums.to(self.y.dtype))
        return self.y


def _target_of(
    y_TKO: Tensor,
    expert_routing: ExpertRouting,
    grouping: Grouping,
    by_ranks: dict[Ranks, list[int]],
) -> _Target:
    rows_M = expert_routing.pair_rows
    if not expert_routing.routing.has_repeated_tokens:
        return _Target(y=y_TKO, sums=y_TKO, rows=rows_M, touched=None)
    groups = [group for alike in by_ranks.values() for group in alike]
    pairs = _pairs_of(sorted(groups), grouping, expert_routing)
    counted = rows_M if pairs is None else rows_M.index_select(0, pairs)
    touched: Tensor = torch.unique(counted)
    sums = y_TKO.index_select(0, touched).float()
    return _Target(y=y_TKO, sums=sums, rows=torch.searchsorted(touched, rows_M), touched=touched)


def _pairs_of(
    groups: list[int], grouping: Grouping, expert_routing: ExpertRouting
) -> Tensor | None:
    """Return the pairs of some groups, in their order; none if these are all pairs."""
    sizes = [grouping.host_sizes[group] for group in groups]
    if sum(sizes) == expert_routing.pair_idx.shape[0]:
        return None
    index = torch.tensor(groups, device=expert_routing.device)
    starts, counts = (part.index_select(0, index) for part in (grouping.starts, grouping.sizes))
    shift = (starts - counts.cumsum(0) + counts).repeat_interleave(counts)
    return shift.add_(torch.arange(sum(sizes), device=shift.device))


def _shrink(
    x_TI: Tensor, weights: ExpertWeights, expert_routing: ExpertRouting, dtype: torch.dtype
) -> Tensor:
    """Multiply each pair's activations with its A: `[M, R', P]`, undefined from the rank on."""
    grouping = grouping_of(expert_routing, is_shared=weights.is_a_shared)
    by_ranks = groups_by_ranks(grouping, weights)
    rows_M = expert_routing.pair_rows
    if x_TI.shape[0] != expert_routing.num_rows:
        rows_M = _tokens_of(expert_routing)
    max_rank = max(map(max, by_ranks))
    v_MC = None
    for ranks, groups in by_ranks.items():
        num_columns = max(ranks) * weights.num_slices
        for bucket in shrink_buckets(groups, grouping, ranks, weights, dtype):
            layout = lay_out(bucket, grouping, expert_routing, is_shared=weights.is_a_shared)
            x_nSI = x_TI.index_select(0, rows_M.index_select(0, layout.padded_pairs)).to(dtype)
            x_nSI = x_nSI.view(len(bucket), layout.size, weights.in_features)
            a_nCI = _factors(weights.a_storage, layout.keys, max(ranks)).to(dtype)
            a_nIC = a_nCI.view(len(bucket), num_columns, weights.in_features).transpose(1, 2)
            v_mC = torch.bmm(x_nSI, a_nIC).view(-1, num_columns)
            if layout.places is not None:
                v_mC = v_mC.index_select(0, layout.places)
            if v_mC.shape[0] == rows_M.shape[0]:  # all pairs, in their order
                return v_mC.view(-1, max_rank, weights.num_slices)
            if v_MC is None:
                v_MC = x_TI.new_empty(rows_M.shape[0], max_rank * weights.num_slices, dtype=dtype)
            v_MC[:, :num_columns].index_copy_(0, layout.pairs, v_mC)
    assert v_MC is not None
    return v_MC.view(-1, max_rank, weights.num_slices)


def _tokens_of(expert_routing: ExpertRouting) -> Tensor:
    tokens: Tensor | None = expert_routing.derived.get("tokens")
    if tokens is None:
        rows, num_choices = expert_routing.pair_rows, expert_routing.num_choices
        tokens = torch.div(rows, num_choices, rounding_mode="floor")
        expert_routing.derived["tokens"] = tokens
    return tokens


def _factors(storage: Tensor, keys: Tensor, rank: int) -> Tensor:
    """Return the first ranks of some (slot, expert) of `[N, X, R, ...]`: `[n, r, ...]`.

    A copy of several, the storage itself for one.
    """
    by_key = storage.flatten(0, 1).flatten(2)
    if keys.shape[0] == 1:
        return by_key[int(keys[0]), :rank][None]
    max_rank = by_key.shape[1]
    if rank == max_rank:
        return by_key.index_select(0, keys)
    rows = (keys[:, None] * max_rank + torch.arange(rank, device=keys.device)).flatten()
    return by_key.flatten(0, 1).index_select(0, rows).view(-1, rank, by_key.shape[2])


def _scale_(v_MRP: Tensor, expert_routing: ExpertRouting, router_weights_TK: Tensor | None) -> None:
    factors_M = None if expert_routing.routing.has_unit_scales else expert_routing.scales
    if router_weights_TK is not None:
        router_M = router_weights_TK.flatten().index_select(0, expert_routing.pair_rows).float()
        factors_M = router_M if factors_M is None else router_M.mul_(factors_M)
    if factors_M is not None:
        v_MRP.mul_(factors_M[:, None, None])


def _expand_bags_(
    target: _Target,
    v_MRP: Tensor,
    weights: ExpertWeights,
    expert_routing: ExpertRouting,
    *,
    ranks: Ranks,
    pairs: Tensor | None,
) -> None:
    """Sum, for each pair, its rows of B weighted by its factors; the pairs have equal ranks."""
    keys_m, v_mC = expert_routing.pair_keys, v_MRP.flatten(1)
    if pairs is not None:
        keys_m, v_mC = keys_m.index_select(0, pairs), v_mC.index_select(0, pairs)
    if weights.is_b_shared:
        keys_m = torch.div(keys_m, weights.num_experts, rounding_mode="floor")
    take_F, piece_F, first_C = _bag_columns(weights, ranks)
    num_pairs, num_chunks = keys_m.shape[0], first_C.shape[0]
    pieces_mF = torch.add(piece_F, keys_m[:, None], alpha=weights.max_rank * num_chunks)
    places = torch.arange(num_pairs, device=keys_m.device)[:, None]
    starts_mC = torch.add(first_C, places, alpha=take_F.shape[0])
    b_pieces = weights.b_storage.view(-1, weights.chunk)
    v_mF = v_mC.index_select(1, take_F).flatten()
    # Arguments: scale_grad_by_freq=False, mode=0 (sum), sparse=False.
    delta = torch.embedding_bag(
        b_pieces, pieces_mF.flatten(), starts_mC.flatten(), False, 0, False, v_mF
    )[0]
    target.add_(pairs, delta.view(num_pairs, -1))


def _bag_columns(weights: ExpertWeights, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for one pair of these ranks, what its bags sum.

    Position of each element's factor in `[R', P]` and of its piece in `[R, C]`, both `[F]`, and
    the first element of each chunk, `[C]`; kept on the weights.
    """
    found: tuple[Tensor, Tensor, Tensor] | None = weights.derived.get(ranks)
    if found is None:
        slices = [
            p for p, out in enumerate(weights.out_features) for _ in range(out // weights.chunk)
        ]
        take: list[int] = []
        piece: list[int] = []
        first: list[int] = []
        for chunk, p in enumerate(slices):
            first.append(len(take))
            take += [rank * weights.num_slices + p for rank in range(ranks[p])]
            piece += [rank * len(slices) + chunk for rank in range(ranks[p])]
        take_F, piece_F, first_C = (
            torch.tensor(column, device=weights.device) for column in (take, piece, first)
        )
        found = weights.derived[ranks] = (take_F, piece_F, first_C)
    return found


def _expand_bucket_(
    target: _Target,
    v_MRP: Tensor,
    weights: ExpertWeights,
    *,
    ranks: Ranks,
    layout: Layout,
) -> None:
    """Multiply the factors of a bucket's pairs with their B, slice by slice."""
    b_nrO = _factors(weights.b_storage, layout.keys, max(ranks)).to(v_MRP.dtype)
    v_mRP = v_MRP.index_select(0, layout.padded_pairs)
    shape = (b_nrO.shape[0], layout.size, b_nrO.shape[2])
    out_nSO = v_MRP.new_empty(shape) if all(ranks) else v_MRP.new_zeros(shape)
    for p, rank in enumerate(ranks):
        if rank:
            low, high = weights.out_ranges[p]
            v_nSr = v_mRP[:, :rank, p].reshape(-1, layout.size, rank)
            torch.bmm(v_nSr, b_nrO[:, :rank, low:high], out=out_nSO[:, :, low:high])
    out_mO = out_nSO.flatten(0, 1)
    if layout.places is not None:
        out_mO = out_mO.index_select(0, layout.places)
    target.add_(layout.pairs, out_mO)
