"""Tile and splits: what the launchers may rely on for every shape."""

from __future__ import annotations

import itertools

import pytest

from lora_kernels.tables import LARGE_TILE, ROW_TILE, SMALL_TILE
from lora_kernels.tiling import (
    MAX_SPLITS,
    block_of_ranks,
    choose_splits,
    expand_tile,
    shrink_tile,
)

TILES = (ROW_TILE, SMALL_TILE, LARGE_TILE)
RANKS = (1, 2, 15, 16, 17, 31, 33, 64, 65, 256, 511, 512)


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize("max_rank", RANKS)
def test_blocks_of_ranks_are_powers_of_two_and_cover_small_ranks_at_once(max_rank: int) -> None:
    block = block_of_ranks(max_rank, 64)

    assert is_power_of_two(block)
    assert 16 <= block <= 64
    assert block >= min(max_rank, 64)
    assert block == 16 or block < 2 * max_rank


@pytest.mark.parametrize(
    ("tile", "max_rank", "element_size"), list(itertools.product(TILES, RANKS, (2, 4)))
)
def test_every_axis_of_a_block_suits_a_matrix_instruction(
    tile: int, max_rank: int, element_size: int
) -> None:
    shrink, expand = shrink_tile(tile, max_rank, element_size), expand_tile(tile, max_rank)

    sizes = [shrink.block_r, shrink.block_i, expand.block_r, expand.block_o]
    assert all(is_power_of_two(size) and size >= 16 for size in sizes)
    assert shrink.block_t == expand.block_t == tile


@pytest.mark.parametrize("in_features", [1, 37, 576, 4096, 28672])
@pytest.mark.parametrize("num_programs", [1, 7, 64, 264, 100_000])
def test_splits_are_few_powers_of_two_of_at_least_two_blocks(
    in_features: int, num_programs: int
) -> None:
    splits = choose_splits(num_programs, in_features, 128, batch_invariant=False)

    assert is_power_of_two(splits)
    assert splits <= MAX_SPLITS
    assert splits == 1 or in_features // splits >= 2 * 128
    assert num_programs < 264 or splits == 1


@pytest.mark.parametrize("in_features", [1, 37, 576, 4096, 28672])
def test_splits_of_the_invariant_mode_depend_on_the_columns_alone(in_features: int) -> None:
    chosen = {choose_splits(n, in_features, 128, batch_invariant=True) for n in range(1, 400)}

    assert len(chosen) == 1
