"""moe_lora_: the launches. SGMV for tiles of pairs, BGMV for single ones.

Letters: `S` splits, `P` slices, `E` entries, `K` choices per token, `R` max rank, `T` tokens,
`I` in, `O` out, `M` pairs, `G` groups. `TK` is a row `t * K + k`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_kernels._triton.launch import (
    check_device,
    has_tf32,
    launch_options,
    shrink_precision,
)
from lora_kernels._triton.moe_kernels import (
    moe_bgmv_expand_kernel,
    moe_bgmv_shrink_kernel,
    moe_sgmv_expand_kernel,
    moe_sgmv_shrink_kernel,
)
from lora_kernels.tables import ROW_TILE, choose_tile
from lora_kernels.tiling import choose_splits, expand_tile, shrink_tile

if TYPE_CHECKING:
    from torch import Tensor

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
    check_device("moe_lora_", y_TKO)
    tile_size = _choose_tile(expert_routing)
    with torch.cuda.device_of(y_TKO):
        v_SPMR = _shrink(x_TI, weights, expert_routing, tile_size)
        if expert_routing.routing.has_repeated_tokens:
            tile_size = ROW_TILE  # a row of several pairs belongs to one program
        _expand_(y_TKO, v_SPMR, weights, expert_routing, router_weights_TK, tile_size=tile_size)
    return y_TKO


def _choose_tile(expert_routing: ExpertRouting) -> int:
    """Return the tile for the pairs of a layer, as if all experts were chosen equally often."""
    routing = expert_routing.routing
    num_segments = len(routing.segments) or routing.num_slots
    num_pairs = expert_routing.pair_idx.shape[0]
    return choose_tile(num_pairs, num_segments * expert_routing.num_experts)


def _shrink(
    x_TI: Tensor, weights: ExpertWeights, expert_routing: ExpertRouting, tile_size: int
) -> Tensor:
    """Return the parts of v by pair, `[S, P, E * K, R]`, undefined where no pair is."""
    a_NXRPI = weights.a_storage
    num_pairs = expert_routing.pair_idx.shape[0]
    element_size = max(x_TI.element_size(), a_NXRPI.element_size())
    tile = shrink_tile(tile_size, weights.max_rank, element_size)
    tiles = None if tile_size == ROW_TILE else tiles_of(expert_routing, tile_size)
    num_tiles = num_pairs if tiles is None else tiles.shape[0]
    num_splits = choose_splits(
        num_tiles * weights.num_slices, weights.in_features, tile.block_i, batch_invariant=False
    )
    shape = (num_splits, weights.num_slices, num_pairs, weights.max_rank)
    v_SPMR = torch.empty(shape, dtype=torch.float32, device=x_TI.device)
    grid = (num_tiles, weights.num_slices * -(-weights.max_rank // tile.block_r), num_splits)
    stride_an, stride_ax, stride_ar, stride_ap, _ = a_NXRPI.stride()
    strides = (stride_an, 0 if weights.is_a_shared else stride_ax, stride_ar, stride_ap)
    sizes = (num_pairs, num_splits, weights.num_slices, expert_routing.num_choices)
    options = {
        "HAS_ROW_X": x_TI.shape[0] == expert_routing.num_rows,
        "BLOCK_R": tile.block_r,
        "BLOCK_I": tile.block_i,
        **launch_options(tile),
    }
    if tiles is None:
        tables = expert_routing.routing.tables
        moe_bgmv_shrink_kernel[grid](
            v_SPMR,
            x_TI,
            a_NXRPI,
            tables.entry_tokens,
            tables.entry_slots,
            expert_routing.local_ids,
            weights.rank_table,
            *sizes,
            weights.num_experts,
            weights.max_rank,
            weights.in_features,
            *x_TI.stride(),
            *strides,
            **options,
        )
        return v_SPMR
    dot, precision = shrink_precision(x_TI, a_NXRPI)
    moe_sgmv_shrink_kernel[grid](
        v_SPMR,
        x_TI,
        a_NXRPI,
        tiles,
        expert_routing.pair_idx,
        expert_routing.pair_rows,
        weights.rank_table,
        *sizes,
        weights.num_experts,
        weights.max_rank,
        weights.in_features,
        *x_TI.stride(),
        *strides,
        BLOCK_T=tile.block_t,
        DOT=dot,
        PRECISION=precision,
        **options,
    )
    return v_SPMR


def _expand_(
    y_TKO: Tensor,
    v_SPMR: Tensor,
    weights: ExpertWeights,
    expert_routing: ExpertRouting,
    router_weights_TK: Tensor | None,
    *,
    tile_size: int,
) -> None:
    """Add the parts of v to the rows of y."""
    b_NXRO = weights.b_storage
    num_splits, num_slices, num_pairs, max_rank = v_SPMR.shape
    tile = expand_tile(tile_size, max_rank)
    out_blocks = weights.out_blocks(tile.block_o)
    stride_bn, stride_bx, stride_br, _ = b_NXRO.stride()
    strides = (
        *y_TKO.stride(),
        stride_bn,
        0 if weights.is_b_shared else stride_bx,
        stride_br,
    )
    router_TK = expert_routing.scales  # never read without HAS_ROUTER
    if router_weights_TK is not None:
        router_TK = router_weights_TK.float().contiguous()
    options = {
        "HAS_ROUTER": router_weights_TK is not None,
        "BLOCK_R": tile.block_r,
        "BLOCK_O": tile.block_o,
        **launch_options(tile),
    }
    if tile_size == ROW_TILE:
        tables = expert_routing.routing.tables
        num_rows = tables.row_tokens.shape[0] * expert_routing.num_choices
        moe_bgmv_expand_kernel[(num_rows, out_blocks.shape[0])](
            y_TKO,
            v_SPMR,
            b_NXRO,
            tables.row_tokens,
            tables.row_indptr,
            tables.row_entries,
            tables.entry_slots,
            tables.scales,
            expert_routing.local_ids,
            router_TK,
            weights.rank_table,
            out_blocks,
            num_pairs,
            num_splits,
            num_slices,
            expert_routing.num_choices,
            weights.num_experts,
            max_rank,
            *strides,
            **options,
        )
        return
    tiles = tiles_of(expert_routing, tile_size)
    is_short = b_NXRO.dtype != torch.float32
    moe_sgmv_expand_kernel[(tiles.shape[0], out_blocks.shape[0])](
        y_TKO,
        v_SPMR,
        b_NXRO,
        tiles,
        expert_routing.pair_idx,
        expert_routing.pair_rows,
        expert_routing.scales,
        router_TK,
        weights.rank_table,
        out_blocks,
        num_pairs,
        num_splits,
        num_slices,
        weights.num_experts,
        max_rank,
        *strides,
        BLOCK_T=tile.block_t,
        SPLIT_TF32=is_short and has_tf32(y_TKO.device),
        **options,
    )


def tiles_of(expert_routing: ExpertRouting, tile_size: int) -> Tensor:
    """Cut the groups into tiles of at most so many pairs, on the device and in a fixed number.

    Returns:
        `[tiles, 3]` int32: first pair, one past the last, `slot * X + expert`; the tiles beyond
        those needed are empty.
    """
    key = ("tiles", tile_size)
    tiles: Tensor | None = expert_routing.derived.get(key)
    if tiles is None:
        tiles = expert_routing.derived[key] = _cut_groups(expert_routing, tile_size)
    return tiles


def _cut_groups(expert_routing: ExpertRouting, tile_size: int) -> Tensor:
    bounds, keys_G = expert_routing.groups
    starts_G, ends_G = bounds[:-1], bounds[1:]
    counts_G = torch.div(ends_G - starts_G + tile_size - 1, tile_size, rounding_mode="floor")
    ends_of_tiles_G = counts_G.cumsum(0)
    num_pairs, num_groups = expert_routing.pair_idx.shape[0], starts_G.shape[0]
    most = min(num_pairs, num_pairs // tile_size + num_groups)
    tile = torch.arange(most, device=starts_G.device)
    # Tiles beyond the last one are cut from the last group, past its end: they are empty.
    group = torch.searchsorted(ends_of_tiles_G, tile, right=True).clamp_(max=num_groups - 1)
    place = tile - (ends_of_tiles_G - counts_G)[group]
    start = starts_G[group] + place * tile_size
    end = torch.minimum(start + tile_size, ends_G[group])
    return torch.stack([start, end, keys_G[group]], 1).int()
