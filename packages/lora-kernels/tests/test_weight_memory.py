"""Memory of packed weights: where parts lie, and how long pieces live."""

from __future__ import annotations

import weakref

import torch

from lora_kernels._native.memory import HUGE_PAGE, MIN_BYTES, PIECE_BYTES, WeightMemory


def test_weights_lie_side_by_side_in_one_piece_that_is_asked_for_in_huge_pages() -> None:
    advised: list[tuple[int, int]] = []
    memory = WeightMemory(lambda address, num_bytes: advised.append((address, num_bytes)))
    (first, _), (second, _) = memory.allocate(MIN_BYTES + 1), memory.allocate(3 * MIN_BYTES)
    assert advised == [(first.data_ptr(), PIECE_BYTES)]
    assert first.data_ptr() % HUGE_PAGE == 0
    assert second.data_ptr() % 4096 == 0
    assert 0 <= second.data_ptr() - first.data_ptr() - first.numel() < HUGE_PAGE
    first.fill_(1)
    second.fill_(2)
    assert bool((first == 1).all())


def test_a_weight_that_does_not_fit_gets_a_piece_of_its_own_size() -> None:
    advised: list[tuple[int, int]] = []
    memory = WeightMemory(lambda address, num_bytes: advised.append((address, num_bytes)))
    held = [memory.allocate(size) for size in (MIN_BYTES, PIECE_BYTES, PIECE_BYTES + 5)]
    assert [num_bytes for _, num_bytes in advised] == [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES + 5]
    assert [part.numel() for part, _ in held] == [MIN_BYTES, PIECE_BYTES, PIECE_BYTES + 5]


def test_a_piece_is_freed_with_the_last_weight_in_it() -> None:
    memory = WeightMemory(lambda address, num_bytes: None)
    first, piece = memory.allocate(MIN_BYTES)
    second, _ = memory.allocate(MIN_BYTES)
    alive = weakref.ref(piece)
    del first, piece
    assert alive() is not None
    del second, _
    assert alive() is None
    assert memory.allocate(MIN_BYTES)[0].numel() == MIN_BYTES


def test_a_small_weight_takes_no_piece() -> None:
    advised: list[tuple[int, int]] = []
    memory = WeightMemory(lambda address, num_bytes: advised.append((address, num_bytes)))
    part, _ = memory.allocate(MIN_BYTES - 1)
    assert advised == []
    assert part.untyped_storage().nbytes() == MIN_BYTES - 1
    assert part.dtype is torch.uint8
