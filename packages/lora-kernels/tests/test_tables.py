"""KernelTables: what the GPU kernels walk, held against the entries it was made from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_kernels import Routing, build_routing, route_tokens
from lora_kernels.tables import LARGE_TILE, ROW_TILE, SMALL_TILE, choose_tile

Entry = tuple[int, int, float]


def route(entries: list[Entry], *, num_tokens: int, num_slots: int) -> Routing:
    return build_routing(
        token_idx=[t for t, _, _ in entries],
        slots=[s for _, s, _ in entries],
        scales=[scale for _, _, scale in entries],
        num_tokens=num_tokens,
        num_slots=num_slots,
    )


@st.composite
def steps(draw: st.DrawFn) -> Routing:
    num_tokens, num_slots = draw(st.integers(1, 150)), draw(st.integers(1, 5))
    slots = st.lists(st.integers(0, num_slots - 1), max_size=draw(st.integers(0, 4)))
    entries = [
        (token, slot, scale / 4)
        for token in range(num_tokens)
        for slot, scale in zip(draw(slots), range(1, 5), strict=False)
    ]
    return route(entries, num_tokens=num_tokens, num_slots=num_slots)


def slots_of_row(routing: Routing, row: int) -> list[int]:
    tables = routing.tables
    first, end = tables.row_indptr[row : row + 2].tolist()
    return tables.entry_slots[tables.row_entries[first:end].long()].tolist()


@settings(max_examples=60, deadline=None)
@given(steps())
def test_rows_own_all_entries_of_their_token_in_order(routing: Routing) -> None:
    tables = routing.tables
    indptr = tables.row_indptr.tolist()

    assert sorted(tables.row_entries.tolist()) == list(range(routing.num_entries))
    assert sorted(tables.row_tokens.tolist()) == routing.touched_tokens.tolist()
    for row, token in enumerate(tables.row_tokens.tolist()):
        entries = tables.row_entries[indptr[row] : indptr[row + 1]].tolist()
        assert entries == sorted(entries)
        assert routing.token_idx[entries].tolist() == [token] * len(entries)


@settings(max_examples=60, deadline=None)
@given(steps(), st.sampled_from([SMALL_TILE, LARGE_TILE]))
def test_tiles_cover_everything_once_and_never_mix_slots(routing: Routing, tile: int) -> None:
    tables = routing.tables
    entry_tiles, row_tiles = tables.entry_tiles(tile).tolist(), tables.row_tiles(tile).tolist()

    assert [e for start, end in entry_tiles for e in range(start, end)] == list(
        range(routing.num_entries)
    )
    assert [u for start, end in row_tiles for u in range(start, end)] == list(
        range(tables.row_tokens.shape[0])
    )
    assert all(0 < end - start <= tile for start, end in entry_tiles + row_tiles)
    for start, end in entry_tiles:
        assert len(set(tables.entry_slots[start:end].tolist())) == 1
    for start, end in row_tiles:
        rows = [slots_of_row(routing, row) for row in range(start, end)]
        assert rows == rows[:1] * len(rows)


def test_rows_with_the_same_set_of_slots_share_a_tile() -> None:
    sets = [[0], [0, 1], [1], [0, 1], [0], [0, 1, 1], [1, 0]]
    entries = [(t, slot, 1.0) for t, slots in enumerate(sets) for slot in slots]
    routing = route(entries, num_tokens=7, num_slots=2)

    tiles = [
        sorted(routing.tables.row_tokens[start:end].tolist())
        for start, end in routing.tables.row_tiles_16.tolist()
    ]

    assert sorted(tiles) == [[0, 4], [1, 3, 6], [2], [5]]


def test_without_weighted_sets_rows_are_entries() -> None:
    routing = route_tokens([1, None, 0, 1], num_slots=2)
    tables = routing.tables

    assert tables.row_tokens.tolist() == tables.entry_tokens.tolist() == [2, 0, 3]
    assert tables.entry_slots.tolist() == [0, 1, 1]
    assert tables.row_indptr.tolist() == [0, 1, 2, 3]
    assert tables.row_tiles_16.tolist() == tables.entry_tiles_16.tolist() == [[0, 1], [1, 3]]
    assert {t.dtype for t in tables.tensors()} == {torch.int32, torch.float32}


@pytest.mark.parametrize(
    ("num_entries", "num_segments", "tile"),
    [
        (1, 1, ROW_TILE),
        (16, 8, ROW_TILE),
        (17, 8, SMALL_TILE),
        (256, 8, SMALL_TILE),
        (257, 8, LARGE_TILE),
    ],
)
def test_decode_takes_rows_and_long_segments_take_large_tiles(
    num_entries: int, num_segments: int, tile: int
) -> None:
    assert choose_tile(num_entries, num_segments) == tile


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_routing_for_another_device_carries_its_tables_in_the_same_copy(device: str) -> None:
    routing = build_routing(
        token_idx=[0, 2, 2], slots=[1, 0, 1], num_tokens=3, num_slots=2, device=device
    )

    tensors = [routing.token_idx, *routing.tables.tensors()]

    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    assert len(storages) == 1 if device == "meta" else len(storages) > 1
    assert all(tensor.storage_offset() * tensor.element_size() % 16 == 0 for tensor in tensors)
