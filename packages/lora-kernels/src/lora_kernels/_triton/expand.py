"""Expand on the GPU: every entry's `scale * B v` into its token's row of y, then gain and bias.

SGMV takes a tile of rows whose tokens have the same slots, BGMV one row a program. A program owns
its rows and walks their entries in order, so that weighted sets need no atomic and each element of
y is read, rounded and written once.

`v` is float32 and B may be shorter. On tensor cores v is cut into two numbers of TF32 precision,
high and low: B is exact in TF32, so that the two products lose about 2**-21 of v.

Letters: `S` splits, `P` slices, `E` entries, `U` rows, `R` max rank, `T` tokens, `O` out,
`N` slots.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _has_work(
    base,
    num_places,
    row_entries_ptr,
    entry_slots_ptr,
    slot_table_ptr,
    num_slices,
    p,
    HAS_AFFINE: tl.constexpr,
):
    """Whether any of a row's slots has a pair for slice p, or a gain or bias."""
    work = 0
    for j in range(num_places):
        entry = tl.load(row_entries_ptr + base + j)
        slot = tl.load(entry_slots_ptr + entry)
        work += tl.load(slot_table_ptr + slot * (num_slices + 1) + p)
        if HAS_AFFINE:
            work += tl.load(slot_table_ptr + slot * (num_slices + 1) + num_slices)
    return work


@triton.jit
def _dot(acc, v, b, SPLIT_TF32: tl.constexpr):
    """Add the product of float32 v and B to acc."""
    b = b.to(tl.float32)
    if SPLIT_TF32:
        # TF32 keeps the upper 19 bits: the mask clears the rest, and what it cleared follows.
        high = (v.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        acc = tl.dot(high, b, acc, input_precision="tf32")
        acc = tl.dot(v - high, b, acc, input_precision="tf32")
    else:
        acc = tl.dot(v, b, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_entries", "num_splits"])
def sgmv_expand_kernel(
    y_ptr,  # [T, sum O_p]
    v_ptr,  # [S, P, E, R] float32, contiguous
    b_ptr,  # [N, R, sum O_p], columns contiguous
    affine_ptr,  # [2, N, sum O_p] float32, if HAS_AFFINE
    tiles_ptr,  # [M, 2]
    row_tokens_ptr,  # [U]
    row_indptr_ptr,  # [U + 1]
    row_entries_ptr,  # [E]
    entry_slots_ptr,  # [E]
    scales_ptr,  # [E] float32
    slot_table_ptr,  # [N, P + 1]
    out_blocks_ptr,  # [blocks, 3]
    num_entries,
    num_splits,
    num_slices,
    num_slots,
    max_rank,
    total_out,
    stride_yt,
    stride_yo,
    stride_bn,
    stride_br,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    SPLIT_TF32: tl.constexpr,
    HAS_AFFINE: tl.constexpr,
):
    tile = tl.program_id(0)
    block = tl.program_id(1)
    start = tl.load(tiles_ptr + 2 * tile)
    end = tl.load(tiles_ptr + 2 * tile + 1)
    if start >= end:
        return
    p = tl.load(out_blocks_ptr + 3 * block)
    first = tl.load(out_blocks_ptr + 3 * block + 1)
    last = tl.load(out_blocks_ptr + 3 * block + 2)
    base = tl.load(row_indptr_ptr + start)
    num_places = tl.load(row_indptr_ptr + start + 1) - base
    work = _has_work(
        base,
        num_places,
        row_entries_ptr,
        entry_slots_ptr,
        slot_table_ptr,
        num_slices,
        p,
        HAS_AFFINE,
    )
    if work == 0:
        return

    offs_u = start + tl.arange(0, BLOCK_T)
    mask_u = offs_u < end
    offs_o = first + tl.arange(0, BLOCK_O)
    mask_o = offs_o < last
    entries_ptrs = row_entries_ptr + base + (offs_u - start) * num_places
    acc = tl.zeros((BLOCK_T, BLOCK_O), dtype=tl.float32)
    for j in range(num_places):
        entries = tl.load(entries_ptrs + j, mask=mask_u, other=0).to(tl.int64)
        scales = tl.load(scales_ptr + entries, mask=mask_u, other=0.0)
        slot = tl.load(entry_slots_ptr + tl.load(row_entries_ptr + base + j))
        rank = tl.load(slot_table_ptr + slot * (num_slices + 1) + p)
        b_slot = b_ptr + slot.to(tl.int64) * stride_bn
        for r in range(0, rank, BLOCK_R):
            offs_r = r + tl.arange(0, BLOCK_R)
            mask_r = offs_r < rank
            v = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
            for split in range(num_splits):
                v_rows = (split * num_slices + p).to(tl.int64) * num_entries + entries
                v_ptrs = v_ptr + v_rows[:, None] * max_rank + offs_r[None, :]
                v += tl.load(v_ptrs, mask=mask_u[:, None] & mask_r[None, :], other=0.0)
            v = v * scales[:, None]
            b_ptrs = b_slot + offs_r.to(tl.int64)[:, None] * stride_br + offs_o[None, :]
            b = tl.load(b_ptrs, mask=mask_r[:, None] & mask_o[None, :], other=0.0)
            acc = _dot(acc, v, b, SPLIT_TF32)

    tokens = tl.load(row_tokens_ptr + offs_u, mask=mask_u, other=0).to(tl.int64)
    y_ptrs = y_ptr + tokens[:, None] * stride_yt + offs_o.to(tl.int64)[None, :] * stride_yo
    mask_y = mask_u[:, None] & mask_o[None, :]
    y = tl.load(y_ptrs, mask=mask_y, other=0.0).to(tl.float32)
    if HAS_AFFINE:
        # A slot with a gain is alone on its rows: there is no other entry's part to multiply.
        for j in range(num_places):
            entries = tl.load(entries_ptrs + j, mask=mask_u, other=0)
            scales = tl.load(scales_ptr + entries, mask=mask_u, other=0.0)
            slot = tl.load(entry_slots_ptr + tl.load(row_entries_ptr + base + j))
            flags = tl.load(slot_table_ptr + slot * (num_slices + 1) + num_slices)
            mask_affine = offs_o < tl.where(flags > 0, last, first)
            gain_ptrs = affine_ptr + slot.to(tl.int64) * total_out + offs_o
            bias_ptrs = affine_ptr + (slot + num_slots).to(tl.int64) * total_out + offs_o
            gain = tl.load(gain_ptrs, mask=mask_affine, other=1.0)
            bias = tl.load(bias_ptrs, mask=mask_affine, other=0.0)
            acc = acc * gain[None, :] + scales[:, None] * bias[None, :]
            y = y * gain[None, :]
    tl.store(y_ptrs, (y + acc).to(y_ptr.dtype.element_ty), mask=mask_y)


@triton.jit(do_not_specialize=["num_entries", "num_splits"])
def bgmv_expand_kernel(
    y_ptr,  # [T, sum O_p]
    v_ptr,  # [S, P, E, R] float32, contiguous
    b_ptr,  # [N, R, sum O_p], columns contiguous
    affine_ptr,  # [2, N, sum O_p] float32, if HAS_AFFINE
    row_tokens_ptr,  # [U]
    row_indptr_ptr,  # [U + 1]
    row_entries_ptr,  # [E]
    entry_slots_ptr,  # [E]
    scales_ptr,  # [E] float32
    slot_table_ptr,  # [N, P + 1]
    out_blocks_ptr,  # [blocks, 3]
    num_entries,
    num_splits,
    num_slices,
    num_slots,
    max_rank,
    total_out,
    stride_yt,
    stride_yo,
    stride_bn,
    stride_br,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    HAS_AFFINE: tl.constexpr,
):
    row = tl.program_id(0)
    block = tl.program_id(1)
    base = tl.load(row_indptr_ptr + row)
    num_places = tl.load(row_indptr_ptr + row + 1) - base
    if num_places <= 0:
        return
    p = tl.load(out_blocks_ptr + 3 * block)
    first = tl.load(out_blocks_ptr + 3 * block + 1)
    last = tl.load(out_blocks_ptr + 3 * block + 2)
    work = _has_work(
        base,
        num_places,
        row_entries_ptr,
        entry_slots_ptr,
        slot_table_ptr,
        num_slices,
        p,
        HAS_AFFINE,
    )
    if work == 0:
        return

    offs_o = first + tl.arange(0, BLOCK_O)
    mask_o = offs_o < last
    acc = tl.zeros((BLOCK_O,), dtype=tl.float32)
    for j in range(num_places):
        entry = tl.load(row_entries_ptr + base + j).to(tl.int64)
        scale = tl.load(scales_ptr + entry)
        slot = tl.load(entry_slots_ptr + entry)
        rank = tl.load(slot_table_ptr + slot * (num_slices + 1) + p)
        b_slot = b_ptr + slot.to(tl.int64) * stride_bn
        for r in range(0, rank, BLOCK_R):
            offs_r = r + tl.arange(0, BLOCK_R)
            mask_r = offs_r < rank
            v = tl.zeros((BLOCK_R,), dtype=tl.float32)
            for split in range(num_splits):
                v_row = (split * num_slices + p).to(tl.int64) * num_entries + entry
                v += tl.load(v_ptr + v_row * max_rank + offs_r, mask=mask_r, other=0.0)
            b_ptrs = b_slot + offs_r.to(tl.int64)[:, None] * stride_br + offs_o[None, :]
            b = tl.load(b_ptrs, mask=mask_r[:, None] & mask_o[None, :], other=0.0)
            acc += tl.sum((v * scale)[:, None] * b.to(tl.float32), axis=0)

    token = tl.load(row_tokens_ptr + row).to(tl.int64)
    y_ptrs = y_ptr + token * stride_yt + offs_o.to(tl.int64) * stride_yo
    y = tl.load(y_ptrs, mask=mask_o, other=0.0).to(tl.float32)
    if HAS_AFFINE:
        # A slot with a gain is alone on its row: there is no other entry's part to multiply.
        for j in range(num_places):
            entry = tl.load(row_entries_ptr + base + j)
            scale = tl.load(scales_ptr + entry)
            slot = tl.load(entry_slots_ptr + entry)
            flags = tl.load(slot_table_ptr + slot * (num_slices + 1) + num_slices)
            mask_affine = offs_o < tl.where(flags > 0, last, first)
            gain_ptrs = affine_ptr + slot.to(tl.int64) * total_out + offs_o
            bias_ptrs = affine_ptr + (slot + num_slots).to(tl.int64) * total_out + offs_o
            gain = tl.load(gain_ptrs, mask=mask_affine, other=1.0)
            bias = tl.load(bias_ptrs, mask=mask_affine, other=0.0)
            acc = acc * gain + scale * bias
            y = y * gain
    tl.store(y_ptrs, (y + acc).to(y_ptr.dtype.element_ty), mask=mask_o)
