"""Shrink on the GPU: `v[s, p, e, :r] = A_p[slot_e, :r] @ x[token_e]`, over columns of split `s`.

SGMV takes a tile of a segment's entries through one slot's A on the tensor cores; BGMV takes one
entry a program. Sums are float32; expand adds the splits, in their order.

Letters: `S` splits, `P` slices, `E` entries, `R` max rank, `T` tokens, `I` in, `N` slots.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_entries", "num_splits"])
def sgmv_shrink_kernel(
    v_ptr,  # [S, P, E, R] float32, contiguous
    x_ptr,  # [T, I]
    a_ptr,  # [R, P, N, I], columns contiguous
    tiles_ptr,  # [M, 2]
    entry_tokens_ptr,  # [E]
    entry_slots_ptr,  # [E]
    slot_table_ptr,  # [N, P + 1]
    num_entries,
    num_splits,
    num_slices,
    max_rank,
    in_features,
    stride_xt,
    stride_xi,
    stride_ar,
    stride_ap,
    stride_an,
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
    start = tl.load(tiles_ptr + 2 * tile)
    end = tl.load(tiles_ptr + 2 * tile + 1)
    if start >= end:
        return
    slot = tl.load(entry_slots_ptr + start)
    rank = tl.load(slot_table_ptr + slot * (num_slices + 1) + p)
    if rank_block * BLOCK_R >= rank:
        return

    offs_e = start + tl.arange(0, BLOCK_T)
    mask_e = offs_e < end
    tokens = tl.load(entry_tokens_ptr + offs_e, mask=mask_e, other=0).to(tl.int64)
    offs_r = rank_block * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = offs_r < rank
    x_rows = x_ptr + tokens * stride_xt
    a_slot = a_ptr + slot.to(tl.int64) * stride_an + p.to(tl.int64) * stride_ap
    a_rows = a_slot + offs_r.to(tl.int64) * stride_ar

    chunk = tl.cdiv(in_features, BLOCK_I * num_splits) * BLOCK_I
    first = split * chunk
    last = tl.minimum(first + chunk, in_features)
    acc = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    for i in range(first, last, BLOCK_I):
        offs_i = i + tl.arange(0, BLOCK_I)
        mask_i = offs_i < last
        x_ptrs = x_rows[:, None] + offs_i.to(tl.int64)[None, :] * stride_xi
        x = tl.load(x_ptrs, mask=mask_e[:, None] & mask_i[None, :], other=0.0)
        a_ptrs = a_rows[None, :] + offs_i[:, None]
        a = tl.load(a_ptrs, mask=mask_i[:, None] & mask_r[None, :], other=0.0)
        acc = tl.dot(x.to(DOT), a.to(DOT), acc, input_precision=PRECISION)

    v_rows = (split * num_slices + p).to(tl.int64) * num_entries + offs_e
    v_ptrs = v_ptr + v_rows[:, None] * max_rank + offs_r[None, :]
    tl.store(v_ptrs, acc, mask=mask_e[:, None] & mask_r[None, :])


@triton.jit(do_not_specialize=["num_entries", "num_splits"])
def bgmv_shrink_kernel(
    v_ptr,  # [S, P, E, R] float32, contiguous
    x_ptr,  # [T, I]
    a_ptr,  # [R, P, N, I], columns contiguous
    entry_tokens_ptr,  # [E]
    entry_slots_ptr,  # [E]
    slot_table_ptr,  # [N, P + 1]
    num_entries,
    num_splits,
    num_slices,
    max_rank,
    in_features,
    stride_xt,
    stride_xi,
    stride_ar,
    stride_ap,
    stride_an,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    e = tl.program_id(0)
    rank_blocks = tl.cdiv(max_rank, BLOCK_R)
    p = tl.program_id(1) // rank_blocks
    rank_block = tl.program_id(1) % rank_blocks
    split = tl.program_id(2)
    slot = tl.load(entry_slots_ptr + e)
    if slot < 0:
        return
    rank = tl.load(slot_table_ptr + slot * (num_slices + 1) + p)
    if rank_block * BLOCK_R >= rank:
        return

    token = tl.load(entry_tokens_ptr + e).to(tl.int64)
    offs_r = rank_block * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = offs_r < rank
    x_row = x_ptr + token * stride_xt
    a_slot = a_ptr + slot.to(tl.int64) * stride_an + p.to(tl.int64) * stride_ap
    a_rows = a_slot + offs_r.to(tl.int64) * stride_ar

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

    v_row = ((split * num_slices + p).to(tl.int64) * num_entries + e) * max_rank
    tl.store(v_ptr + v_row + offs_r, tl.sum(acc, axis=1), mask=mask_r)


@triton.jit(do_not_specialize=["vocabulary"])
def gather_kernel(
    v_ptr,  # [1, 1, E, R] float32, contiguous
    token_ids_ptr,  # [T]
    a_ptr,  # [R, 1, N, V], columns contiguous
    entry_tokens_ptr,  # [E]
    entry_slots_ptr,  # [E]
    slot_table_ptr,  # [N, 2]
    vocabulary,
    max_rank,
    stride_id,
    stride_ar,
    stride_an,
    BLOCK_R: tl.constexpr,
):
    e = tl.program_id(0)
    slot = tl.load(entry_slots_ptr + e)
    if slot < 0:
        return
    rank = tl.load(slot_table_ptr + slot * 2)
    token = tl.load(entry_tokens_ptr + e).to(tl.int64)
    token_id = tl.load(token_ids_ptr + token * stride_id).to(tl.int64)
    # Nobody waits for the device to refuse an id: one outside the vocabulary adds nothing.
    known_rank = tl.where((token_id >= 0) & (token_id < vocabulary), rank, 0)

    a_slot = a_ptr + slot.to(tl.int64) * stride_an + token_id
    for r in range(0, rank, BLOCK_R):
        offs_r = r + tl.arange(0, BLOCK_R)
        a_ptrs = a_slot + offs_r.to(tl.int64) * stride_ar
        a = tl.load(a_ptrs, mask=offs_r < known_rank, other=0.0).to(tl.float32)
        tl.store(v_ptr + e.to(tl.int64) * max_rank + offs_r, a, mask=offs_r < rank)
