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
    groups_of,
    lay_out,
    shrink_buckets,
    split_bags,
)
from lora_kernels._aten.plan import compute_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels._aten.moe_plan import Bucket, Group
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
    groups = groups_of(weights, expert_routing, is_shared=weights.is_b_shared)
    if not groups:
        return y_TKO
    dtype = compute_dtype(x_TI.dtype, weights.dtype)
    v_MRP = _shrink(x_TI, weights, expert_routing, dtype)
    _scale_(v_MRP, expert_routing, router_weights_TK)
    target = _target_of(y_TKO, expert_routing, groups)
    in_bags: list[Group] = []
    if dtype == weights.dtype:
        in_bags, groups = split_bags(groups, weights, dtype)
    by_ranks: dict[tuple[int, ...], list[Group]] = {}
    for group in in_bags:
        by_ranks.setdefault(group.ranks, []).append(group)
    for alike in by_ranks.values():
        _expand_bags_(target, v_MRP, weights, alike)
    for bucket in expand_buckets(groups, weights, dtype):
        _expand_bucket_(target, v_MRP, weights, bucket)
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

    def add_(self, pairs: Tensor, delta: Tensor, low: int, high: int) -> None:
        """Add `[m, high - low]` to the columns of the pairs' rows."""
        sums, rows = self.sums[:, low:high], self.rows.index_select(0, pairs)
        if self.touched is not None:  # rows may repeat
            sums.index_add_(0, rows, delta.to(sums.dtype))
        elif sums.dtype == delta.dtype and sums.is_contiguous():
            sums.index_add_(0, rows, delta)
        else:
            # Added in the wider dtype and rounded once. Where rows are strided, index_add_ of a
            # 16-bit dtype would rewrite all of them, those of base tokens included.
            sums.index_copy_(0, rows, sums.index_select(0, rows).add_(delta))

    def finish_(self) -> Tensor:
        """Round sums into the output, and return it."""
        if self.touched is not None:
            self.y.index_copy_(0, self.touched, self.sums.to(self.y.dtype))
        return self.y


def _target_of(y_TKO: Tensor, expert_routing: ExpertRouting, groups: list[Group]) -> _Target:
    rows_M = expert_routing.pair_rows
    if not expert_routing.routing.has_repeated_tokens:
        return _Target(y=y_TKO, sums=y_TKO, rows=rows_M, touched=None)
    touched: Tensor = torch.unique(torch.cat([rows_M[g.start : g.end] for g in groups]))
    sums = y_TKO.index_select(0, touched).float()
    return _Target(y=y_TKO, sums=sums, rows=torch.searchsorted(touched, rows_M), touched=touched)


def _shrink(
    x_TI: Tensor, weights: ExpertWeights, expert_routing: ExpertRouting, dtype: torch.dtype
) -> Tensor:
    """Multiply each pair's activations with its A: `[M, R', P]`, undefined from the rank on."""
    groups = groups_of(weights, expert_routing, is_shared=weights.is_a_shared)
    max_rank = max(max(group.ranks) for group in groups)
    rows_M = expert_routing.pair_rows
    if x_TI.shape[0] != expert_routing.num_rows:
        rows_M = torch.div(rows_M, expert_routing.num_choices, rounding_mode="floor")
    width = max_rank * weights.num_slices
    v_MC = x_TI.new_empty((rows_M.shape[0], width), dtype=dtype)
    for bucket in shrink_buckets(groups, weights, dtype):
        num_columns = max(bucket.ranks) * weights.num_slices
        if len(bucket.groups) == 1:
            (group,) = bucket.groups
            x_SI = x_TI.index_select(0, rows_M[group.start : group.end]).to(dtype)
            a_CI = weights.a_storage.view(-1, weights.max_rank * weights.num_slices, x_SI.shape[1])
            a_CI = a_CI[group.key, :num_columns].to(dtype)
            v_MC[group.start : group.end, :num_columns] = torch.mm(x_SI, a_CI.t())
            continue
        layout = lay_out(bucket, x_TI.device)
        x_nSI = x_TI.index_select(0, rows_M.index_select(0, layout.padded_pairs)).to(dtype)
        a_nCI = _gather(weights.a_storage, layout.keys, weights.max_rank, max(bucket.ranks))
        a_nCI = a_nCI.view(-1, num_columns, weights.in_features).to(dtype)
        x_nSI = x_nSI.view(-1, layout.size, weights.in_features)
        v_mC = torch.bmm(x_nSI, a_nCI.transpose(1, 2)).view(-1, num_columns)
        if layout.places is not None:
            v_mC = v_mC.index_select(0, layout.places)
        if num_columns == width:
            v_MC.index_copy_(0, layout.pairs, v_mC)
        else:
            v_MC[:, :num_columns].index_copy_(0, layout.pairs, v_mC)
    return v_MC.view(-1, max_rank, weights.num_slices)


def _gather(storage: Tensor, keys: Tensor, max_rank: int, rank: int) -> Tensor:
    """Copy the first ranks of some (slot, expert) out of `[N, X, R, ...]`: `[n * r, ...]`."""
    rows = (keys[:, None] * max_rank + torch.arange(rank, device=keys.device)).flatten()
    return storage.view(-1, storage[0, 0, 0].numel()).index_select(0, rows)


def _scale_(v_MRP: Tensor, expert_routing: ExpertRouting, router_weights_TK: Tensor | None) -> None:
    factors_M = None if expert_routing.routing.has_unit_scales else expert_routing.scales
    if router_weights_TK is not None:
        router_M = router_weights_TK.flatten().index_select(0, expert_routing.pair_rows).float()
        factors_M = router_M if factors_M is None else router_M.mul_(factors_M)
    if factors_M is not None:
        v_MRP.mul_(factors_M[:, None, None])


def _expand_bags_(
    target: _Target, v_MRP: Tensor, weights: ExpertWeights, groups: list[Group]
) -> None:
    """Sum, for each pair, its rows of B weighted by its factors; the groups have equal ranks."""
    device = v_MRP.device
    columns = [[g.key for g in groups], [g.start for g in groups], [g.size for g in groups]]
    keys, starts, sizes = torch.tensor(columns, device=device).unbind()
    ends = sizes.cumsum(0)
    of_pair = torch.stack([keys, starts - ends + sizes], 1).repeat_interleave(sizes, dim=0)
    keys_m = of_pair[:, 0]
    pairs = of_pair[:, 1] + torch.arange(keys_m.shape[0], device=device)
    take_F, piece_F, first_C = _bag_columns(weights, groups[0].ranks)
    num_chunks = weights.total_out_features // weights.chunk
    pieces_mF = keys_m[:, None] * (weights.max_rank * num_chunks) + piece_F
    places = torch.arange(keys_m.shape[0], device=device)[:, None]
    starts_mC = places * take_F.shape[0] + first_C
    v_mF = v_MRP.flatten(1).index_select(0, pairs).index_select(1, take_F)
    b_pieces = weights.b_storage.view(-1, weights.chunk)
    # Arguments: scale_grad_by_freq=False, mode=0 (sum), sparse=False.
    delta = torch.embedding_bag(
        b_pieces, pieces_mF.flatten(), starts_mC.flatten(), False, 0, False, v_mF.flatten()
    )[0]
    target.add_(pairs, delta.view(keys_m.shape[0], -1), 0, weights.total_out_features)


def _bag_columns(weights: ExpertWeights, ranks: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
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
        device = weights.device
        found = (
            torch.tensor(take, device=device),
            torch.tensor(piece, device=device),
            torch.tensor(first, device=device),
        )
        weights.derived[ranks] = found
    return found


def _expand_bucket_(target: _Target, v_MRP: Tensor, weights: ExpertWeights, bucket: Bucket) -> None:
    """Multiply the factors of a bucket's pairs with their B, slice by slice."""
    layout = lay_out(bucket, v_MRP.device)
    max_rank = max(bucket.ranks)
    if len(bucket.groups) == 1:
        b_storage = weights.b_storage.view(-1, weights.max_rank, weights.total_out_features)
        b_nrO = b_storage[bucket.groups[0].key, :max_rank][None]
    else:
        b_nrO = _gather(weights.b_storage, layout.keys, weights.max_rank, max_rank)
        b_nrO = b_nrO.view(-1, max_rank, weights.total_out_features)
    v_mRP = v_MRP.index_select(0, layout.padded_pairs)
    for p, rank in enumerate(bucket.ranks):
        if rank:
            low, high = weights.out_ranges[p]
            v_nSr = v_mRP[:, :rank, p].reshape(-1, layout.size, rank)
            part_mO = torch.bmm(v_nSr, b_nrO[:, :rank, low:high].to(v_nSr.dtype)).flatten(0, 1)
            if layout.places is not None:
                part_mO = part_mO.index_select(0, layout.places)
            target.add_(layout.pairs, part_mO, low, high)
