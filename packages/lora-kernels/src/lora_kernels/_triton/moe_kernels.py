"""Shrink and expand over (entry, chosen expert) pairs on the GPU.

SGMV takes a tile of pairs that share slot and expert through that expert's factor on the tensor
cores. BGMV takes one pair or row a program and finds slot and expert itself, so that it needs no
sorting; a program owns its row and walks the row's entries in order, so that weighted sets need
no atomic. `v` is kept by pair, `entry * K + choice`, whatever the order of the work.

Letters: `S` splits, `P` slices, `E` entries, `K` choices per token, `T` tokens, `U` rows: tokens
with an entry, `N` slots, `X` experts, `R` max rank, `I` in, `O` out, `M` pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lora_kernels._triton.expand import _dot


@triton.jit(do_not_specialize=["num_pairs", "num_splits"])
def moe_sgmv_shrink_kernel(
    v_ptr,  # [S, P, E * K, R] float32, contiguous
    x_ptr,  # [T, I] or, if HAS_ROW_X, [T * K, I]
    a_ptr,  # [N, X, R, P, I], columns contiguous; the stride of a shared expert is 0
    tiles_ptr,  # [tiles, 3]: first pair, one past the last, slot * X + expert
    pair_idx_ptr,  # [M] int64
    pair_rows_ptr,  # [M] int64
    rank_table_ptr,  # [N, P]
    num_pairs,
    num_splits,
    num_slices,
    num_choices,
    num_experts,
    max_rank,
    in_features,
    stride_xt,
    stride_xi,
    stride_an,
    stride_ax,
    stride_ar,
    stride_ap,
    HAS_ROW_X: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    rank_blocks = tl.cdiv(max_rank, BLOCK_R)
    p = tl.program_id(1) // rank_blocks
    rank_block = tl.program_id(1) % rank_blocks
    split = tl.program_id(2)
    start = tl.load(tiles_ptr + 3 * tile)
    end = tl.load(tiles_ptr + 3 * tile + 1)
    if start >= end:
        return
    key = tl.load(tiles_ptr + 3 * tile + 2)
    slot = key // num_experts
    expert = key % num_experts
    rank = tl.load(rank_table_ptr + slot * num_slices + p)
    if rank_block * BLOCK_R >= rank:
        return

    offs_m = start + tl.arange(0, BLOCK_T)
    mask_m = offs_m < end
    rows = tl.load(pair_rows_ptr + offs_m, mask=mask_m, other=0)
    if not HAS_ROW_X:
        rows = rows // num_choices
    offs_r = rank_block * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = offs_r < rank
    x_rows = x_ptr + rows * stride_xt
    a_expert = a_ptr + slot.to(tl.int64) * stride_an + expert.to(tl.int64) * stride_ax
    a_rows = a_expert + offs_r.to(tl.int64) * stride_ar + p.to(tl.int64) * stride_ap

    chunk = tl.cdiv(in_features, BLOCK_I * num_splits) * BLOCK_I
    first = split * chunk
    last = tl.minimum(first + chunk, in_features)
    acc = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    for i in range(first, last, BLOCK_I):
        offs_i = i + tl.arange(0, BLOCK_I)
        mask_i = offs_i < last
        x_ptrs = x_rows[:, None] + offs_i.to(tl.int64)[None, :] * stride_xi
        x = tl.load(x_ptrs, mask=mask_m[:, None] & mask_i[None, :], other=0.0)
        a_ptrs = a_rows[None, :] + offs_i[:, None]
        a = tl.load(a_ptrs, mask=mask_i[:, None] & mask_r[None, :], other=0.0)
        acc = tl.dot(x.to(DOT), a.to(DOT), acc, input_precision=PRECISION)

    pairs = tl.load(pair_idx_ptr + offs_m, mask=mask_m, other=0)
    v_rows = (split * num_slices + p).to(tl.int64) * num_pairs + pairs
    v_ptrs = v_ptr + v_rows[:, None] * max_rank + offs_r[None, :]
    tl.store(v_ptrs, acc, mask=mask_m[:, None] & mask_r[None, :])


@triton.jit(do_not_specialize=["num_pairs", "num_splits"])
def moe_bgmv_shrink_kernel(
    v_ptr,  # [S, P, E * K, R] float32, contiguous
    x_ptr,  # [T, I] or, if HAS_ROW_X, [T * K, I]
    a_ptr,  # [N, X, R, P, I], columns contiguous; the stride of a shared expert is 0
    entry_tokens_ptr,  # [E]
    entry_slots_ptr,  # [E]
    local_ids_ptr,  # [T, K] int64, contiguous
    rank_table_ptr,  # [N, P]
    num_pairs,
    num_splits,
    num_slices,
    num_choices,
    num_experts,
    max_rank,
    in_features,
    stride_xt,
    stride_xi,
    stride_an,
    stride_ax,
    stride_ar,
    stride_ap,
    HAS_ROW_X: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    pair = tl.program_id(0)
    rank_blocks = tl.cdiv(max_rank, BLOCK_R)
    p = tl.program_id(1) // rank_blocks
    rank_block = tl.program_id(1) % rank_blocks
    split = tl.program_id(2)
    entry = pair // num_choices
    slot = tl.load(entry_slots_ptr + entry)
    if slot < 0:
        return
    rank = tl.load(rank_table_ptr + slot * num_slices + p)
    if rank_block * BLOCK_R >= rank:
        return
    token = tl.load(entry_tokens_ptr + entry).to(tl.int64)
    row = token * num_choices + pair % num_choices
    expert = tl.load(local_ids_ptr + row)
    if expert >= num_experts:
        return

    offs_r = rank_block * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = offs_r < rank
    x_row = x_ptr + (row if HAS_ROW_X else token) * stride_xt
    a_expert = a_ptr + slot.to(tl.int64) * stride_an + expert * stride_ax
    a_rows = a_expert + offs_r.to(tl.int64) * stride_ar + p.to(tl.int64) * stride_ap

    chunk = tl.cdiv(in_features, BLOCK_I * num_splits) * BLOCK_I
    first = split * chunk
    last = tl.minimum(first + chunk, in_features)
    # Products are summed lane by lane; lanes are added once, after the loop.
    acc = tl.zeros((BLOCK_R, BLOCK_I), dtype=tl.float32)
    for i in range(first, last, BLOCK_I):
        offs_i = i + tl.arange(0, BLOCK_I)
        mask_i = offs_i < last
        x = tl.load(x_row + offs_i.to(tl.int64) * stride_xi, mask=mask_i, other=0.0)
        a_ptrs = a_rows[:, None] + offs_i[None, :]
        a = tl.load(a_ptrs, mask=mask_r[:, None] & mask_i[None, :], other=0.0)
        acc += a.to(tl.float32) * x.to(tl.float32)[None, :]

    v_row = ((split * num_slices + p).to(tl.int64) * num_pairs + pair) * max_rank
    tl.store(v_ptr + v_row + offs_r, tl.sum(acc, axis=1), mask=mask_r)


@triton.jit(do_not_specialize=["num_pairs", "num_splits"])
def moe_sgmv_expand_kernel(
    y_ptr,  # [T * K, sum O_p]
    v_ptr,  # [S, P, E * K, R] float32, contiguous
    b_ptr,  # [N, X, R, sum O_p], columns contiguous; the stride of a shared expert is 0
    tiles_ptr,  # [tiles, 3]: first pair, one past the last, slot * X + expert
    pair_idx_ptr,  # [M] int64
    pair_rows_ptr,  # [M] int64, no row twice
    pair_scales_ptr,  # [M] float32
    router_ptr,  # [T * K] float32, contiguous, if HAS_ROUTER
    rank_table_ptr,  # [N, P]
    out_blocks_ptr,  # [blocks, 3]
    num_pairs,
    num_splits,
    num_slices,
    num_experts,
    max_rank,
    stride_yt,
    stride_yo,
    stride_bn,
    stride_bx,
    stride_br,
    HAS_ROUTER: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    SPLIT_TF32: tl.constexpr,
):
    tile = tl.program_id(0)
    block = tl.program_id(1)
    start = tl.load(tiles_ptr + 3 * tile)
    end = tl.load(tiles_ptr + 3 * tile + 1)
    if start >= end:
        return
    key = tl.load(tiles_ptr + 3 * tile + 2)
    slot = key // num_experts
    expert = key % num_experts
    p = tl.load(out_blocks_ptr + 3 * block)
    first = tl.load(out_blocks_ptr + 3 * block + 1)
    last = tl.load(out_blocks_ptr + 3 * block + 2)
    rank = tl.load(rank_table_ptr + slot * num_slices + p)
    if rank == 0:
        return

    offs_m = start + tl.arange(0, BLOCK_T)
    mask_m = offs_m < end
    pairs = tl.load(pair_idx_ptr + offs_m, mask=mask_m, other=0)
    rows = tl.load(pair_rows_ptr + offs_m, mask=mask_m, other=0)
    factors = tl.load(pair_scales_ptr + offs_m, mask=mask_m, other=0.0)
    if HAS_ROUTER:
        factors = factors * tl.load(router_ptr + rows, mask=mask_m, other=0.0)
    offs_o = first + tl.arange(0, BLOCK_O)
    mask_o = offs_o < last
    b_expert = b_ptr + slot.to(tl.int64) * stride_bn + expert.to(tl.int64) * stride_bx
    acc = tl.zeros((BLOCK_T, BLOCK_O), dtype=tl.float32)
    for r in range(0, rank, BLOCK_R):
        offs_r = r + tl.arange(0, BLOCK_R)
        mask_r = offs_r < rank
        v = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
        for split in range(num_splits):
            v_rows = (split * num_slices + p).to(tl.int64) * num_pairs + pairs
            v_ptrs = v_ptr + v_rows[:, None] * max_rank + offs_r[None, :]
            v += tl.load(v_ptrs, mask=mask_m[:, None] & mask_r[None, :], other=0.0)
        v = v * factors[:, None]
        b_ptrs = b_expert + offs_r.to(tl.int64)[:, None] * stride_br + offs_o[None, :]
        b = tl.load(b_ptrs, mask=mask_r[:, None] & mask_o[None, :], other=0.0)
        acc = _dot(acc, v, b, SPLIT_TF32)

    y_ptrs = y_ptr + rows[:, None] * stride_yt + offs_o.to(tl.int64)[None, :] * stride_yo
    mask_y = mask_m[:, None] & mask_o[None, :]
    y = tl.load(y_ptrs, mask=mask_y, other=0.0).to(tl.float32)
    tl.store(y_ptrs, (y + acc).to(y_ptr.dtype.element_ty), mask=mask_y)


@triton.jit(do_not_specialize=["num_pairs", "num_splits"])
def moe_bgmv_expand_kernel(
    y_ptr,  # [T * K, sum O_p]
    v_ptr,  # [S, P, E * K, R] float32, contiguous
    b_ptr,  # [N, X, R, sum O_p], columns contiguous; the stride of a shared expert is 0
    row_tokens_ptr,  # [U]
    row_indptr_ptr,  # [U + 1]
    row_entries_ptr,  # [E]
    entry_slots_ptr,  # [E]
    scales_ptr,  # [E] float32
    local_ids_ptr,  # [T, K] int64, contiguous
    router_ptr,  # [T * K] float32, contiguous, if HAS_ROUTER
    rank_table_ptr,  # [N, P]
    out_blocks_ptr,  # [blocks, 3]
    num_pairs,
    num_splits,
    num_slices,
    num_choices,
    num_experts,
    max_rank,
    stride_yt,
    stride_yo,
    stride_bn,
    stride_bx,
    stride_br,
    HAS_ROUTER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    place = tl.program_id(0) // num_choices
    choice = tl.program_id(0) % num_choices
    block = tl.program_id(1)
    base = tl.load(row_indptr_ptr + place)
    num_places = tl.load(row_indptr_ptr + place + 1) - base
    if num_places <= 0:
        return
    row = tl.load(row_tokens_ptr + place).to(tl.int64) * num_choices + choice
    expert = tl.load(local_ids_ptr + row)
    if expert >= num_experts:
        return
    p = tl.load(out_blocks_ptr + 3 * block)
    first = tl.load(out_blocks_ptr + 3 * block + 1)
    last = tl.load(out_blocks_ptr + 3 * block + 2)
    work = 0
    for j in range(num_places):
        slot = tl.load(entry_slots_ptr + tl.load(row_entries_ptr + base + j))
        work += tl.load(rank_table_ptr + slot * num_slices + p)
    if work == 0:
        return

    offs_o = first + tl.arange(0, BLOCK_O)
    mask_o = offs_o < last
    acc = tl.zeros((BLOCK_O,), dtype=tl.float32)
    for j in range(num_places):
        entry = tl.load(row_entries_ptr + base + j).to(tl.int64)
        factor = tl.load(scales_ptr + entry)
        if HAS_ROUTER:
            factor = factor * tl.load(router_ptr + row)
        slot = tl.load(entry_slots_ptr + entry)
        rank = tl.load(rank_table_ptr + slot * num_slices + p)
        b_expert = b_ptr + slot.to(tl.int64) * stride_bn + expert * stride_bx
        for r in range(0, rank, BLOCK_R):
            offs_r = r + tl.arange(0, BLOCK_R)
            mask_r = offs_r < rank
            v = tl.zeros((BLOCK_R,), dtype=tl.float32)
            for split in range(num_splits):
                v_row = (split * num_slices + p).to(tl.int64) * num_pairs
                v_row = v_row + entry * num_choices + choice
                v += tl.load(v_ptr + v_row * max_rank + offs_r, mask=mask_r, other=0.0)
            b_ptrs = b_expert + offs_r.to(tl.int64)[:, None] * stride_br + offs_o[None, :]
            b = tl.load(b_ptrs, mask=mask_r[:, None] & mask_o[None, :], other=0.0)
            acc += tl.sum((v * factor)[:, None] * b.to(tl.float32), axis=0)

    y_ptrs = y_ptr + row * stride_yt + offs_o.to(tl.int64) * stride_yo
    y = tl.load(y_ptrs, mask=mask_o, other=0.0).to(tl.float32)
    tl.store(y_ptrs, (y + acc).to(y_ptr.dtype.element_ty), mask=mask_o)
