"""shrink, expand_ and apply_lora_: the launches. SGMV for tiles of entries, BGMV for single ones.

There is no fused kernel for decode: every block of the output would have to repeat shrink, or wait
for the others, and a captured graph makes the second launch cheap.

Letters: `S` splits, `P` slices, `E` entries, `R` max rank, `T` tokens, `I` in, `O` out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_kernels._triton.expand import bgmv_expand_kernel, sgmv_expand_kernel
from lora_kernels._triton.launch import (
    check_device,
    has_tf32,
    launch_options,
    shrink_precision,
)
from lora_kernels._triton.shrink import bgmv_shrink_kernel, sgmv_shrink_kernel
from lora_kernels.tables import ROW_TILE, SMALL_TILE
from lora_kernels.tiling import choose_splits, expand_tile, shrink_tile

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.routing import Routing
    from lora_kernels.weights import StackedWeights


def apply_lora_(
    y_TO: Tensor,
    x_TI: Tensor,
    weights: StackedWeights,
    routing: Routing,
    *,
    batch_invariant: bool,
) -> Tensor:
    """See `lora_kernels.apply_lora_`."""
    v_SPER = shrink_splits(x_TI, weights, routing, batch_invariant=batch_invariant)
    return expand_splits_(y_TO, v_SPER, weights, routing, batch_invariant=batch_invariant)


def shrink(
    x_TI: Tensor, weights: StackedWeights, routing: Routing, *, batch_invariant: bool
) -> Tensor:
    """See `lora_kernels.shrink`."""
    v_SPER = shrink_splits(x_TI, weights, routing, batch_invariant=batch_invariant, fill_zeros=True)
    return v_SPER[0] if v_SPER.shape[0] == 1 else v_SPER.sum(0)


def expand_(
    y_TO: Tensor,
    v_PER: Tensor,
    weights: StackedWeights,
    routing: Routing,
    *,
    batch_invariant: bool,
) -> Tensor:
    """See `lora_kernels.expand_`."""
    v_SPER = v_PER.contiguous()[None]
    return expand_splits_(y_TO, v_SPER, weights, routing, batch_invariant=batch_invariant)


def shrink_splits(
    x_TI: Tensor,
    weights: StackedWeights,
    routing: Routing,
    *,
    batch_invariant: bool,
    fill_zeros: bool = False,
) -> Tensor:
    """Return the parts of v, `[S, P, E, R]`; undefined from a slot's rank on, unless zeros."""
    check_device("shrink", x_TI)
    tables, a_RPNI = routing.tables, weights.a_storage
    tile_size = SMALL_TILE if batch_invariant else routing.tile
    tiles = tables.entry_tiles(tile_size)
    element_size = max(x_TI.element_size(), a_RPNI.element_size())
    tile = shrink_tile(tile_size, weights.max_rank, element_size)
    num_tiles = routing.num_entries if tile_size == ROW_TILE else tiles.shape[0]
    num_splits = choose_splits(
        num_tiles * weights.num_slices,
        weights.in_features,
        tile.block_i,
        batch_invariant=batch_invariant,
    )
    shape = (num_splits, weights.num_slices, routing.num_entries, weights.max_rank)
    new = torch.zeros if fill_zeros else torch.empty
    v_SPER = new(shape, dtype=torch.float32, device=x_TI.device)
    rank_blocks = -(-weights.max_rank // tile.block_r)
    grid = (num_tiles, weights.num_slices * rank_blocks, num_splits)
    tail = (
        tables.entry_tokens,
        tables.entry_slots,
        weights.slot_table,
        routing.num_entries,
        num_splits,
        weights.num_slices,
        weights.max_rank,
        weights.in_features,
        *x_TI.stride(),
        *a_RPNI.stride()[:3],
    )
    options = launch_options(tile)
    with torch.cuda.device_of(x_TI):
        if tile_size == ROW_TILE:
            bgmv_shrink_kernel[grid](
                v_SPER, x_TI, a_RPNI, *tail, BLOCK_R=tile.block_r, BLOCK_I=tile.block_i, **options
            )
        else:
            dot, precision = shrink_precision(x_TI, a_RPNI)

            sgmv_shrink_kernel[grid](
                v_SPER,
                x_TI,
                a_RPNI,
                tiles,
                *tail,
                BLOCK_T=tile.block_t,
                BLOCK_R=tile.block_r,
                BLOCK_I=tile.block_i,
                DOT=dot,
                PRECISION=precision,
                **options,
            )
    return v_SPER


def expand_splits_(
    y_TO: Tensor,
    v_SPER: Tensor,
    weights: StackedWeights,
    routing: Routing,
    *,
    batch_invariant: bool,
) -> Tensor:
    """Add the parts of v, `[S, P, E, R]`, to the rows of y, then gains and biases."""
    check_device("expand_", y_TO)
    tables, b_NRO = routing.tables, weights.b_storage
    tile_size = SMALL_TILE if batch_invariant else routing.tile
    tile = expand_tile(tile_size, weights.max_rank)
    out_blocks = weights.out_blocks(tile.block_o)
    tail = (
        tables.row_tokens,
        tables.row_indptr,
        tables.row_entries,
        tables.entry_slots,
        tables.scales,
        weights.slot_table,
        out_blocks,
        routing.num_entries,
        v_SPER.shape[0],
        weights.num_slices,
        weights.num_slots,
        weights.max_rank,
        weights.total_out_features,
        *y_TO.stride(),
        *b_NRO.stride()[:2],
    )
    has_affine = weights.affine is not None
    affine = weights.affine if has_affine else tables.scales  # never read without HAS_AFFINE
    options = {
        "BLOCK_R": tile.block_r,
        "BLOCK_O": tile.block_o,
        "HAS_AFFINE": has_affine,
        **launch_options(tile),
    }
    with torch.cuda.device_of(y_TO):
        if tile_size == ROW_TILE:
            grid = (tables.row_tokens.shape[0], out_blocks.shape[0])
            bgmv_expand_kernel[grid](y_TO, v_SPER, b_NRO, affine, *tail, **options)
        else:
            tiles = tables.row_tiles(tile_size)
            is_short = b_NRO.dtype != torch.float32
            sgmv_expand_kernel[(tiles.shape[0], out_blocks.shape[0])](
                y_TO,
                v_SPER,
                b_NRO,
                affine,
                tiles,
                *tail,
                BLOCK_T=tile.block_t,
                SPLIT_TF32=is_short and has_tf32(y_TO.device),
                **options,
            )
    return y_TO
