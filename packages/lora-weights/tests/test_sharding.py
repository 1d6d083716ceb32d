"""Tensor-parallel slices: shards make up the whole, and ranks together compute what one does.

Ranks are simulated one after another; the collectives are what a layer would do between them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from lora_weights import BoundPart, FullModule, LoraPair, PackedPart
from lora_weights.sharding import (
    ShardKind,
    ShardLayout,
    TensorParallel,
    output_spans,
    rank_span,
    shard_packed,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 16
MAX_RANK = 8


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(rank: int, rows: int, *, seed: int = 0, width: int = WIDTH) -> LoraPair:
    return LoraPair(
        lora_a=random(rank, width, seed=seed), lora_b=random(rows, rank, seed=seed + 100)
    )


def ranks(size: int, *, is_fully_sharded: bool = False) -> list[TensorParallel]:
    return [
        TensorParallel(size=size, rank=rank, is_fully_sharded=is_fully_sharded)
        for rank in range(size)
    ]


def some(value: torch.Tensor | LoraPair | None) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value


def pair_of(part: BoundPart | None) -> LoraPair:
    assert part is not None
    assert part.pair is not None
    return part.pair


COLUMNS = {
    "column": ShardLayout(kind=ShardKind.COLUMN, sizes=(24,)),
    "merged": ShardLayout(kind=ShardKind.COLUMN, sizes=(24, 24)),
    "variable": ShardLayout(kind=ShardKind.VARIABLE, sizes=(8, 8, 16, 24)),
    "qkv": ShardLayout(kind=ShardKind.QKV, sizes=(32, 8, 16), num_kv_heads=2),
}


def packed_of(layout: ShardLayout, *, one_name: bool, seed: int = 0) -> PackedPart:
    """Return a part with pair, gain and bias for each slice, or one for all of them."""
    sizes = (sum(layout.sizes),) if one_name else layout.sizes
    parts = [
        BoundPart(
            pair=pair(3 + index, rows, seed=seed + index),
            gain=random(rows, seed=seed + index + 50),
            bias=random(rows, seed=seed + index + 60),
        )
        for index, rows in enumerate(sizes)
    ]
    return PackedPart(parts=tuple(parts))


def column_output(
    packed: PackedPart, layout: ShardLayout, size: int, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Return a column layer's output with `size` ranks, given the base's output y of all rows."""
    whole = y.clone()
    starts = [sum(layout.sizes[:index]) for index in range(len(layout.sizes))]
    for parallel in ranks(size):
        shard = shard_packed(packed, layout, parallel)
        spans = output_spans(layout, parallel)
        rows_of = [
            torch.arange(start + low, start + high)
            for start, (low, high) in zip(starts, spans, strict=True)
        ]
        rows_of = [torch.cat(rows_of)] if len(shard.parts) == 1 else rows_of
        for part, rows in zip(shard.parts, rows_of, strict=True):
            if part is not None:
                piece = pair_of(part)
                local = y[:, rows] + x @ piece.lora_a.T @ piece.lora_b.T
                whole[:, rows] = local * some(part.gain) + some(part.bias)
    return whole


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("one_name", [False, True])
@pytest.mark.parametrize("name", COLUMNS)
def test_column_layers_of_all_ranks_compute_what_one_does(
    name: str, one_name: bool, size: int
) -> None:
    layout = COLUMNS[name]
    packed = packed_of(layout, one_name=one_name)
    x, y = random(5, WIDTH, seed=1), random(5, sum(layout.sizes), seed=2)

    found = column_output(packed, layout, size, x, y)

    start, wanted = 0, y.clone()
    for part in packed.parts:
        piece = pair_of(part)
        end = start + piece.out_features
        delta = x @ piece.lora_a.T @ piece.lora_b.T
        assert part is not None
        wanted[:, start:end] = (y[:, start:end] + delta) * some(part.gain) + some(part.bias)
        start = end
    assert torch.allclose(found, wanted, atol=1e-10)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("one_name", [False, True])
@pytest.mark.parametrize("name", ["column", "merged", "qkv"])
def test_fully_sharded_column_layers_gather_the_shrunk_activations(
    name: str, one_name: bool, size: int
) -> None:
    layout = COLUMNS[name]
    packed = packed_of(layout, one_name=one_name)
    x = random(5, WIDTH, seed=1)

    for index, part in enumerate(packed.parts):
        whole = pair_of(part)
        group = ranks(size, is_fully_sharded=True)
        shards = [
            pair_of(shard_packed(packed, layout, one, max_rank=MAX_RANK).parts[index])
            for one in group
        ]
        # All-gather along the rank dimension, then each rank expands its own rows.
        shrunk = torch.cat([x @ shard.lora_a.T for shard in shards], dim=1)
        plain = [pair_of(shard_packed(packed, layout, one).parts[index]) for one in ranks(size)]
        for shard, unsharded in zip(shards, plain, strict=True):
            wanted = x @ whole.lora_a.T @ unsharded.lora_b.T
            assert torch.allclose(shrunk @ shard.lora_b.T, wanted, atol=1e-10)
        assert sum(shard.lora_a.shape[0] for shard in shards) == whole.rank
        assert all(shard.lora_a.shape[0] <= MAX_RANK // size for shard in shards)


ROW = ShardLayout(kind=ShardKind.ROW, sizes=(24,))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_row_layers_of_all_ranks_add_up_to_what_one_computes(size: int) -> None:
    gain, bias = random(24, seed=3), random(24, seed=4)
    packed = PackedPart(parts=(BoundPart(pair=pair(3, 24), gain=gain, bias=bias),))
    x, weight = random(5, WIDTH, seed=1), random(24, WIDTH, seed=2)

    total = torch.zeros(5, 24, dtype=torch.float64)
    for parallel in ranks(size):
        shard = shard_packed(packed, ROW, parallel).parts[0]
        low, high = parallel.share(WIDTH, "columns")
        piece = pair_of(shard)
        assert shard is not None
        partial = x[:, low:high] @ (weight[:, low:high] + piece.lora_b @ piece.lora_a).T
        total += partial * some(shard.gain) + (0 if shard.bias is None else shard.bias)

    whole = pair_of(packed.parts[0])
    wanted = x @ (weight + whole.lora_b @ whole.lora_a).T * gain + bias
    assert torch.allclose(total, wanted, atol=1e-10)


@pytest.mark.parametrize("size", [2, 4])
def test_fully_sharded_row_layers_sum_the_shrunk_activations_and_expand_their_own_columns(
    size: int,
) -> None:
    packed = PackedPart(parts=(BoundPart(pair=pair(3, 24)),))
    x, weight = random(5, WIDTH, seed=1), random(24, WIDTH, seed=2)
    group = ranks(size, is_fully_sharded=True)
    shards = [pair_of(shard_packed(packed, ROW, one).parts[0]) for one in group]
    columns = [one.share(WIDTH, "columns") for one in group]

    # All-reduce of the shrunk activations, then the layer's own all-reduce of the outputs.
    shrunk = sum(
        (
            x[:, low:high] @ shard.lora_a.T
            for shard, (low, high) in zip(shards, columns, strict=True)
        ),
        start=torch.zeros(5, 3, dtype=torch.float64),
    )
    total = torch.zeros(5, 24, dtype=torch.float64)
    for one, shard, (low, high) in zip(group, shards, columns, strict=True):
        partial = x[:, low:high] @ weight[:, low:high].T
        first, last = one.share(24, "rows")
        partial[:, first:last] += shrunk @ shard.lora_b.T
        total += partial

    whole = pair_of(packed.parts[0])
    assert torch.allclose(total, x @ (weight + whole.lora_b @ whole.lora_a).T, atol=1e-10)


@pytest.mark.parametrize(
    "kind", [ShardKind.REPLICATED, ShardKind.EMBEDDING, ShardKind.LOGITS, ShardKind.HEAD]
)
@pytest.mark.parametrize("is_fully_sharded", [False, True])
def test_c33_replicated_layers_are_whole_on_every_rank(
    kind: ShardKind, is_fully_sharded: bool
) -> None:
    packed = PackedPart(parts=(BoundPart(pair=pair(3, 7)),))
    layout = ShardLayout(kind=kind, sizes=(7,))

    for parallel in ranks(2, is_fully_sharded=is_fully_sharded):
        assert shard_packed(packed, layout, parallel, max_rank=MAX_RANK) is packed


@pytest.mark.parametrize("is_fully_sharded", [False, True])
def test_c31_each_rank_gets_its_rows_of_every_projection_in_a_fused_tensor(
    is_fully_sharded: bool,
) -> None:
    layout = ShardLayout(kind=ShardKind.QKV, sizes=(64, 32, 32), num_kv_heads=2)
    numbers = torch.arange(128, dtype=torch.float64)
    lora_b = numbers[:, None].expand(128, 4).clone()
    fused = BoundPart(
        pair=LoraPair(lora_a=random(4, WIDTH), lora_b=lora_b), gain=numbers, bias=-numbers
    )
    packed = PackedPart(parts=(fused,))

    rows = []
    for parallel in ranks(2, is_fully_sharded=is_fully_sharded):
        shard = shard_packed(packed, layout, parallel, max_rank=MAX_RANK).parts[0]
        assert shard is not None
        rows.append([int(row) for row in some(shard.gain)])
        assert torch.equal(pair_of(shard).lora_b[:, 0], some(shard.gain))
        assert torch.equal(some(shard.bias), -some(shard.gain))

    assert rows[0] == [*range(32), *range(64, 80), *range(96, 112)]
    assert rows[1] == [*range(32, 64), *range(80, 96), *range(112, 128)]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("adapted", [(False, False, True), (True, True, True)])
def test_c32_ranks_beyond_the_kv_heads_repeat_a_head_and_never_have_an_empty_slice(
    size: int, adapted: Sequence[bool]
) -> None:
    layout = ShardLayout(kind=ShardKind.QKV, sizes=(64, 16, 16), num_kv_heads=2)
    packed = PackedPart(
        parts=tuple(
            BoundPart(pair=pair(2, rows, seed=rows + index)) if there else None
            for index, (rows, there) in enumerate(zip(layout.sizes, adapted, strict=True))
        )
    )
    value = pair_of(packed.parts[2]).lora_b

    for parallel in ranks(size):
        shard = shard_packed(packed, layout, parallel)
        head = parallel.rank // (size // 2)
        assert [part is not None for part in shard.parts] == list(adapted)
        assert torch.equal(pair_of(shard.parts[2]).lora_b, value[head * 8 : head * 8 + 8])
        assert all(pair_of(part).out_features > 0 for part in shard.parts if part)
        if adapted[0]:
            query, width = pair_of(packed.parts[0]).lora_b, 64 // size
            wanted = query[parallel.rank * width : (parallel.rank + 1) * width]
            assert torch.equal(pair_of(shard.parts[0]).lora_b, wanted)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    size=st.sampled_from([1, 2, 3, 4]),
    one_name=st.booleans(),
    seed=st.integers(0, 99),
)
def test_shards_of_column_layers_concatenate_to_the_whole(
    sizes: Sequence[int], size: int, one_name: bool, seed: int
) -> None:
    layout = ShardLayout(kind=ShardKind.VARIABLE, sizes=tuple(size * rows for rows in sizes))
    packed = packed_of(layout, one_name=one_name, seed=seed)

    shards = [shard_packed(packed, layout, one) for one in ranks(size)]

    for index, part in enumerate(packed.parts):
        whole = pair_of(part)
        pieces = [pair_of(shard.parts[index]) for shard in shards]
        counts = sizes if one_name else [sizes[index]]
        cut = [torch.split(piece.lora_b, list(counts)) for piece in pieces]
        joined = torch.cat([piece for column in zip(*cut, strict=True) for piece in column])
        assert torch.equal(joined, whole.lora_b)
        assert all(torch.equal(piece.lora_a, whole.lora_a) for piece in pieces)


@given(rank=st.integers(1, 12), size=st.sampled_from([1, 2, 3, 4]), more=st.integers(0, 3))
def test_shares_of_the_rank_are_disjoint_and_complete(rank: int, size: int, more: int) -> None:
    max_rank = -(-rank // size) * size + more * size

    spans = [rank_span(rank, one, max_rank=max_rank) for one in ranks(size)]

    assert [row for low, high in spans for row in range(low, high)] == list(range(rank))


@given(heads=st.integers(1, 8), size=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 99))
def test_kv_rows_of_all_ranks_cover_every_head_equally_often(
    heads: int, size: int, seed: int
) -> None:
    assume(heads % size == 0 or size % heads == 0)
    layout = ShardLayout(kind=ShardKind.QKV, sizes=(8 * heads, heads, heads), num_kv_heads=heads)
    assume(8 * heads % size == 0)

    rows = [output_spans(layout, one)[1] for one in ranks(size)]

    covered = [head for low, high in rows for head in range(low, high)]
    assert sorted(covered) == sorted(list(range(heads)) * max(1, size // heads))


def test_whole_replacements_are_cut_like_the_base() -> None:
    full = FullModule(weight=random(24, WIDTH), bias=random(24, seed=1))
    packed = PackedPart(parts=(BoundPart(full=full),))
    columns = [shard_packed(packed, COLUMNS["column"], one).parts[0] for one in ranks(2)]
    rows = [shard_packed(packed, ROW, one).parts[0] for one in ranks(2)]

    fulls = [part.full for part in (*columns, *rows) if part is not None and part.full is not None]

    assert torch.equal(torch.cat([f.weight for f in fulls[:2]]), full.weight)
    assert torch.equal(torch.cat([some(f.bias) for f in fulls[:2]]), some(full.bias))
    assert torch.equal(torch.cat([f.weight for f in fulls[2:]], dim=1), full.weight)
    assert [f.bias is None for f in fulls[2:]] == [False, True]


def test_shards_are_views_of_the_whole() -> None:
    packed = PackedPart(parts=(BoundPart(pair=pair(4, 24)),))
    whole = pair_of(packed.parts[0])
    places = {factor.untyped_storage().data_ptr() for factor in (whole.lora_a, whole.lora_b)}

    for layout in (COLUMNS["column"], ROW):
        for one in ranks(2, is_fully_sharded=True):
            shard = pair_of(shard_packed(packed, layout, one).parts[0])
            assert shard.lora_a.untyped_storage().data_ptr() in places
            assert shard.lora_b.untyped_storage().data_ptr() in places


@pytest.mark.parametrize(
    ("layout", "parts", "match"),
    [
        (ShardLayout(kind=ShardKind.COLUMN, sizes=(23,)), 1, "slice 0 is 23, .* multiple of 2"),
        (ShardLayout(kind=ShardKind.COLUMN, sizes=(2, 3)), 2, "slice 1 is 3, .* multiple of 2"),
        (ShardLayout(kind=ShardKind.COLUMN, sizes=(2, 2, 2)), 2, r"2 parts, expected 1 or 3"),
        (
            ShardLayout(kind=ShardKind.QKV, sizes=(24, 8, 8), num_kv_heads=1),
            1,
            "query heads is 3, expected a multiple of 2",
        ),
        (
            ShardLayout(kind=ShardKind.QKV, sizes=(24, 12, 12), num_kv_heads=3),
            1,
            "kv heads is 3, expected a multiple of 2",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_errors_with_the_numbers(
    layout: ShardLayout, parts: int, match: str
) -> None:
    packed = PackedPart(parts=tuple(BoundPart(pair=pair(2, 4)) for _ in range(parts)))

    with pytest.raises(ValueError, match=match):
        shard_packed(packed, layout, TensorParallel(size=2, rank=0))


def test_kv_heads_that_neither_divide_nor_are_divided_are_an_error() -> None:
    layout = ShardLayout(kind=ShardKind.QKV, sizes=(64, 24, 24), num_kv_heads=3)

    with pytest.raises(ValueError, match="kv heads is 3, expected a divisor or a multiple of 4"):
        output_spans(replace(layout, sizes=(96, 24, 24)), TensorParallel(size=4, rank=0))


@pytest.mark.parametrize(
    ("layout", "max_rank", "match"),
    [
        (COLUMNS["column"], 6, "the max rank is 6, expected a multiple of 4"),
        (COLUMNS["column"], None, "the rank of the pair is 3, expected a multiple of 4"),
        (COLUMNS["column"], 2, "rank 3, expected at most 2"),
        (COLUMNS["variable"], 8, "4 slices of any size is not offered fully sharded"),
        (ShardLayout(kind=ShardKind.ROW, sizes=(26,)), 8, "output rows is 26, .* multiple of 4"),
    ],
)
def test_fully_sharded_ranks_that_do_not_divide_are_errors_with_the_numbers(
    layout: ShardLayout, max_rank: int | None, match: str
) -> None:
    rows = sum(layout.sizes)
    packed = PackedPart(parts=(BoundPart(pair=pair(3, rows)),))
    parallel = TensorParallel(size=4, rank=1, is_fully_sharded=True)

    with pytest.raises(ValueError, match=match):
        shard_packed(packed, layout, parallel, max_rank=max_rank)


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_a_rank_outside_its_group_is_an_error(size: int, rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of a group of {size}"):
        TensorParallel(size=size, rank=rank)
