"""Memory for slots: zeros of their own, side by side, freed with the last one."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from lora_kernels.slot_memory import MIN_BYTES, PIECE_BYTES, SlotMemory


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (16, 3, 8, 576), (2, 3, 70_001)])
def test_zeros_have_the_shape_and_type_and_can_be_written(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    zeros = SlotMemory().zeros(shape, dtype)
    assert zeros.shape == shape
    assert zeros.dtype is dtype
    assert zeros.is_contiguous()
    assert not zeros.any()
    zeros.fill_(1)
    assert zeros.float().sum() == zeros.numel()


def test_tensors_share_neither_numbers_nor_counts_of_writes() -> None:
    memory = SlotMemory()
    tensors = [memory.zeros((size,), torch.bfloat16) for size in (MIN_BYTES, MIN_BYTES + 1, 7)]
    for number, tensor in enumerate(tensors):
        before = [other._version for other in tensors]
        tensor.fill_(number + 1)
        changed = [other._version != old for other, old in zip(tensors, before, strict=True)]
        assert changed == [index == number for index in range(3)]
    for number, tensor in enumerate(tensors):
        assert tensor.float().eq(number + 1).all()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_storages_lie_side_by_side_and_begin_with_a_page() -> None:
    memory = SlotMemory()
    first, second = (memory.zeros((MIN_BYTES + 2,), torch.float16) for _ in range(2))
    assert first.data_ptr() % 4096 == second.data_ptr() % 4096 == 0
    assert 0 < second.data_ptr() - first.data_ptr() < first.nbytes + 4096


def test_what_does_not_fit_into_a_piece_gets_another_one() -> None:
    memory = SlotMemory()
    small = memory.zeros((MIN_BYTES,), torch.float32)
    large = memory.zeros((PIECE_BYTES // 4 + 1,), torch.float32)
    small.fill_(1)
    large[0], large[-1] = 2, 3
    assert small.eq(1).all()
    assert large[[0, 1, -1]].tolist() == [2, 0, 3]


def test_a_piece_is_freed_with_the_last_tensor_in_it() -> None:
    memory = SlotMemory()
    tensors = [memory.zeros((MIN_BYTES,), torch.float32) for _ in range(2)]
    assert memory._piece is not None
    piece = memory._piece()
    assert piece is not None
    gone = weakref.ref(piece)
    del piece
    tensors.pop()
    gc.collect()
    assert gone() is not None
    tensors.clear()
    gc.collect()
    assert gone() is None
    assert not memory.zeros((MIN_BYTES,), torch.float32).any()
