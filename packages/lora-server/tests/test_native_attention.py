"""Native attention over paged keys and values, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lora_kernels.native import why_not_native
from lora_server.model.attention_step import DecodeGroup, PrefillChunk
from lora_server.model.native.attention import decode_tokens, prefill_chunks
from lora_server.model.native.kernels import LayerKernels, load_layer_kernels

DTYPES = [torch.float32, torch.bfloat16]
HEADS = [(9, 3, 64), (4, 4, 16), (8, 1, 48), (4, 2, 32), (8, 2, 128), (6, 2, 256), (10, 2, 80)]
# Logits reach 15: that many units in the last place of a float32 sum are a relative error of 5e-6
# in a weight. Values reach 4, and are rounded to bfloat16 once as results and once as weights.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.01}
SCALING = 0.2
Lengths = list[tuple[int, int]]
"""Context and number of tokens of each chunk."""


def load(dtype: torch.dtype) -> LayerKernels:
    kernels = load_layer_kernels(dtype)
    assert kernels is not None
    return kernels


def exact(
    query: torch.Tensor, stored: torch.Tensor, positions: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Attention of rows `[n, H, D]` over one sequence's `[L, 2, K, D]`, in float64."""
    groups = query.shape[1] // stored.shape[2]
    key, value = stored.double().repeat_interleave(groups, dim=2).unbind(1)
    places = torch.arange(len(stored))
    hidden = places > positions[:, None]
    if window is not None:
        hidden |= places <= positions[:, None] - window
    logits = torch.einsum("nhd,lhd->hnl", query.double(), key) * SCALING
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    # What has no weight does not matter, whatever it is.
    seen = torch.where(hidden.all(0)[:, None, None], 0, value)
    return torch.einsum("hnl,lhd->nhd", weights, seen)


class Chunks:
    """Sequences in a store of shuffled blocks, whose unused places are not a number."""

    def __init__(
        self,
        lengths: Lengths,
        heads: tuple[int, int, int],
        dtype: torch.dtype,
        *,
        block_size: int = 16,
        scale: float = 1.0,
    ) -> None:
        num_heads, num_kv_heads, width = heads
        torch.manual_seed(num_heads * width + block_size)
        self.dtype = dtype
        counts = [-(-(context + count) // block_size) for context, count in lengths]
        order = torch.split(torch.randperm(sum(counts) + 2)[: sum(counts)], counts)
        shape = (sum(counts) + 2, block_size, 2, num_kv_heads, width)
        self.store = torch.full(shape, torch.nan, dtype=dtype)
        self.chunks, row = [], 1
        for (context, count), blocks in zip(lengths, order, strict=True):
            stored = torch.randn(context + count, 2, num_kv_heads, width) * scale
            places = torch.arange(context + count)
            flat = self.store.view(-1, 2, num_kv_heads, width)
            flat[blocks[places // block_size] * block_size + places % block_size] = stored.to(dtype)
            self.chunks.append(
                PrefillChunk(start=row, num_tokens=count, context=context, blocks=blocks)
            )
            row += count
        self.query = torch.randn(row + 1, num_heads, width).to(dtype)

    def keys(self, chunk: PrefillChunk) -> torch.Tensor:
        return self.store[chunk.blocks].flatten(0, 1)[: chunk.num_keys]

    def attend(self, chunks: list[PrefillChunk], window: int | None) -> torch.Tensor:
        out = torch.zeros_like(self.query)
        prefill_chunks(
            load(self.dtype), self.query, out, self.store, chunks, scaling=SCALING, window=window
        )
        return out


def cut(chunk: PrefillChunk, sizes: list[int]) -> list[PrefillChunk]:
    """The same rows in chunks of these sizes, repeated."""
    parts: list[PrefillChunk] = []
    done = 0
    while done < chunk.num_tokens:
        count = min(sizes[len(parts) % len(sizes)], chunk.num_tokens - done)
        parts.append(
            PrefillChunk(
                start=chunk.start + done,
                num_tokens=count,
                context=chunk.context + done,
                blocks=chunk.blocks,
            )
        )
        done += count
    return parts


def decode(made: Chunks, window: int | None) -> torch.Tensor:
    """Each sequence's last row, as a token of its own."""
    longest = max(len(chunk.blocks) for chunk in made.chunks)
    table = torch.zeros(len(made.chunks), longest, dtype=torch.int64)
    for row, chunk in zip(table, made.chunks, strict=True):
        row[: len(chunk.blocks)] = chunk.blocks
    group = DecodeGroup(
        rows=torch.tensor([c.start + c.num_tokens - 1 for c in made.chunks]),
        blocks=table.flatten(),
        blocks_per_sequence=longest,
        positions=torch.tensor([c.num_keys - 1 for c in made.chunks]),
    )
    out = torch.zeros_like(made.query)
    decode_tokens(
        load(made.dtype), made.query, out, made.store, group, scaling=SCALING, window=window
    )
    return out


def check(
    found: torch.Tensor,
    made: Chunks,
    window: int | None,
    *,
    last: bool = False,
    tolerance: float | None = None,
) -> None:
    tolerance = TOLERANCES[made.dtype] if tolerance is None else tolerance
    for chunk in made.chunks:
        first = chunk.num_tokens - 1 if last else 0
        own = slice(chunk.start + first, chunk.start + chunk.num_tokens)
        positions = torch.arange(chunk.context + first, chunk.num_keys)
        expected = exact(made.query[own], made.keys(chunk), positions, window)
        torch.testing.assert_close(found[own].double(), expected, atol=tolerance, rtol=tolerance)


if why_not_native() is None:

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("heads", HEADS)
    @pytest.mark.parametrize("block_size", [8, 16, 32])
    @pytest.mark.parametrize("window", [None, 7, 40])
    def test_each_row_of_a_chunk_attends_to_what_it_may_see(
        dtype: torch.dtype, heads: tuple[int, int, int], block_size: int, window: int | None
    ) -> None:
        lengths = [(0, 37), (50, 1), (13, 70), (33, 2), (0, 16)]
        made = Chunks(lengths, heads, dtype, block_size=block_size)
        found = made.attend(made.chunks, window)
        check(found, made, window)
        assert not found[[0, -1]].any()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("window", [None, 300])
    @pytest.mark.parametrize("scale", [1.0, 8.0])
    def test_a_long_context_is_joined_from_several_blocks_of_keys(
        dtype: torch.dtype, window: int | None, scale: float
    ) -> None:
        made = Chunks([(900, 140), (250, 30), (0, 600)], (6, 2, 64), dtype, scale=scale)
        # A logit's error grows with it, the result's with the values; rounding weights does not.
        growth = scale**2 if dtype is torch.float32 else scale
        check(made.attend(made.chunks, window), made, window, tolerance=TOLERANCES[dtype] * growth)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("heads", [(9, 3, 64), (4, 2, 48)])
    @pytest.mark.parametrize("window", [None, 50, 290])
    @pytest.mark.parametrize("sizes", [[1], [16], [31, 5, 64], [128], [300, 7]])
    def test_where_chunks_are_cut_does_not_change_a_bit(
        dtype: torch.dtype, heads: tuple[int, int, int], window: int | None, sizes: list[int]
    ) -> None:
        made = Chunks([(0, 330), (5, 40)], heads, dtype)
        whole = made.attend(made.chunks, window)
        parts = [part for chunk in made.chunks for part in cut(chunk, sizes)]
        assert torch.equal(made.attend(parts[::-1], window), whole)
        for part in parts[:: len(parts) // 3]:
            alone = made.attend([part], window)
            own = slice(part.start, part.start + part.num_tokens)
            assert torch.equal(alone[own], whole[own])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("heads", [(6, 2, 64), (4, 2, 48)])
    @pytest.mark.parametrize("window", [None, 60])
    @pytest.mark.parametrize("part", [0, 1])
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_a_number_that_is_not_finite_reaches_only_rows_that_see_it(
        dtype: torch.dtype, heads: tuple[int, int, int], window: int | None, part: int, bad: float
    ) -> None:
        made = Chunks([(20, 130), (0, 50)], heads, dtype)
        clean = made.attend(made.chunks, window)
        first, place = made.chunks[0], 90
        made.store[first.blocks[place // 16], place % 16, part] = bad
        dirty = made.attend(made.chunks, window)
        seeing = torch.zeros(len(clean), dtype=torch.bool)
        stop = first.num_keys if window is None else min(place + window, first.num_keys)
        seeing[first.start + place - first.context : first.start + stop - first.context] = True
        assert torch.equal(dirty[~seeing], clean[~seeing])
        assert not dirty[seeing].isfinite().all(-1).any() or part == 0
        if bad != bad:  # noqa: PLR0124 - only NaN differs from itself
            assert dirty[seeing].isnan().all()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("heads", HEADS)
    @pytest.mark.parametrize("block_size", [8, 32])
    @pytest.mark.parametrize("window", [None, 7, 600])
    def test_decoding_reads_sequences_of_any_length(
        dtype: torch.dtype, heads: tuple[int, int, int], block_size: int, window: int | None
    ) -> None:
        lengths = [(0, 1), (127, 1), (128, 1), (511, 1), (512, 1), (1300, 1), (30, 1)]
        made = Chunks(lengths, heads, dtype, block_size=block_size)
        check(decode(made, window), made, window, last=True)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("window", [None, 700])
    def test_neighbours_of_a_decoding_sequence_do_not_change_a_bit(
        dtype: torch.dtype, window: int | None
    ) -> None:
        lengths = [(40, 1), (1300, 1), (2, 1), (600, 1), (129, 1), (5, 1), (77, 1), (8, 1)]
        made = Chunks(lengths, (9, 3, 64), dtype)
        together = decode(made, window)
        every = list(made.chunks)
        for chunk in every:
            made.chunks = [chunk]
            assert torch.equal(decode(made, window)[chunk.start], together[chunk.start])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("part", [0, 1])
    def test_a_key_that_is_not_a_number_is_not_taken_for_one_without_weight(
        dtype: torch.dtype, part: int
    ) -> None:
        made = Chunks([(700, 1), (30, 1)], (6, 2, 64), dtype)
        clean = decode(made, None)
        first, second = made.chunks
        made.store[first.blocks[3], 5, part] = torch.nan
        dirty = decode(made, None)
        assert dirty[first.start].isnan().all()
        assert torch.equal(dirty[second.start], clean[second.start])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("num_threads", [1, 2, 3])
    def test_the_number_of_threads_does_not_change_a_bit(
        dtype: torch.dtype, num_threads: int
    ) -> None:
        made = Chunks([(1300, 40), (0, 70)], (9, 3, 64), dtype)
        before: Any = made.attend(made.chunks, None), decode(made, None)
        usual = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            after = made.attend(made.chunks, None), decode(made, None)
        finally:
            torch.set_num_threads(usual)
        assert torch.equal(before[0], after[0])
        assert torch.equal(before[1], after[1])
