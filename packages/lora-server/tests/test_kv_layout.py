"""Places of tokens and tables of blocks, against the definition, token by token."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_server.engine.kv_layout import (
    add_slots,
    as_tensor,
    int64_array,
    padded_blocks,
    split_tensor,
)

CPU = torch.device("cpu")
BLOCKS = st.lists(st.integers(0, 10**6), min_size=1, max_size=9)


@given(BLOCKS, st.integers(1, 5), st.data())
def test_a_tokens_place_is_in_the_block_of_its_position(
    blocks: list[int], block_size: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(blocks) * block_size - 1))
    count = data.draw(st.integers(0, len(blocks) * block_size - start))
    slots = int64_array([7])

    add_slots(slots, int64_array(blocks), start=start, count=count, block_size=block_size)

    assert slots.tolist() == [
        7,
        *(
            blocks[p // block_size] * block_size + p % block_size
            for p in range(start, start + count)
        ),
    ]


@given(st.lists(BLOCKS, min_size=1, max_size=5), st.integers(1, 12))
def test_rows_of_a_table_are_cut_or_filled_with_their_first_block(
    tables: list[list[int]], width: int
) -> None:
    found = padded_blocks(map(int64_array, tables), width).tolist()

    rows = [found[i : i + width] for i in range(0, len(found), width)]
    assert rows == [[*blocks[:width], *[blocks[0]] * (width - len(blocks))] for blocks in tables]


def test_a_tensor_is_the_memory_of_its_array() -> None:
    values = int64_array([1, 2, 3, 4])

    whole, part = as_tensor(values, CPU), as_tensor(values, CPU, start=1, count=2)
    values[2] = 9

    assert whole.tolist() == [1, 2, 9, 4]
    assert part.tolist() == [2, 9]
    assert as_tensor(int64_array(), CPU).shape == (0,)


def test_splits_positions_and_places_and_the_positions_of_groups() -> None:
    moving = int64_array([1, 2, 3, 10, 20, 30, 2, 1, 3])

    parts = split_tensor(moving, [2, 1], CPU)

    assert [part.tolist() for part in parts] == [[1, 2, 3], [10, 20, 30], [2, 1], [3]]
