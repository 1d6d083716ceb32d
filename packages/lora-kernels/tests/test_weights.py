"""StackedWeights: what a slot holds after writing and resetting it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lora_kernels import KernelArgumentError, StackedWeights, UnsupportedShapeError


def allocate(**changes: Any) -> StackedWeights:
    arguments: dict[str, Any] = {
        "num_slots": 3,
        "max_rank": 8,
        "in_features": 5,
        "out_features": (4, 2),
        "dtype": torch.float32,
        "device": "cpu",
    }
    return StackedWeights.allocate(**(arguments | changes))


def pair(rank: int, out: int, in_features: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(rank, in_features), torch.randn(out, rank)


def test_allocated_slots_are_zero_and_absent() -> None:
    weights = allocate()

    assert [list(a.shape) for a in weights.lora_a] == [[3, 8, 5], [3, 8, 5]]
    assert [list(b.shape) for b in weights.lora_b] == [[3, 4, 8], [3, 2, 8]]
    assert all(not tensor.any() for tensor in (*weights.lora_a, *weights.lora_b))
    assert weights.slot_ranks == [(0, 0)] * 3
    assert (weights.num_slots, weights.max_rank, weights.total_out_features) == (3, 8, 6)
    assert weights.nbytes == 4 * (3 * 8 * 5 * 2 + 3 * 8 * 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_written_slot_holds_the_cast_pairs_padded_with_zeros(dtype: torch.dtype) -> None:
    weights = allocate(dtype=dtype)
    first, second = pair(3, 4), pair(8, 2)

    weights.write_slot(1, [first, second])

    assert weights.slot_ranks == [(0, 0), (3, 8), (0, 0)]
    assert torch.equal(weights.lora_a[0][1, :3], first[0].to(dtype))
    assert torch.equal(weights.lora_b[0][1, :, :3], first[1].to(dtype))
    assert torch.equal(weights.lora_a[1][1], second[0].to(dtype))
    assert torch.equal(weights.lora_b[1][1], second[1].to(dtype))
    assert not weights.lora_a[0][1, 3:].any()
    assert not weights.lora_b[0][1, :, 3:].any()
    assert not weights.lora_a[0][0].any()
    assert not weights.lora_b[1][2].any()


def test_nothing_of_a_larger_adapter_remains_under_a_smaller_one() -> None:
    weights = allocate()
    weights.write_slot(0, [pair(8, 4), pair(8, 2)])

    weights.write_slot(0, [pair(2, 4), None])

    assert weights.slot_ranks[0] == (2, 0)
    assert not weights.lora_a[0][0, 2:].any()
    assert not weights.lora_b[0][0, :, 2:].any()
    assert not weights.lora_a[1][0].any()
    assert not weights.lora_b[1][0].any()


def test_reset_empties_one_slot_only() -> None:
    weights = allocate()
    kept = pair(2, 4)
    weights.write_slot(0, [kept, None])
    weights.write_slot(1, [pair(2, 4), pair(1, 2)])
    weights.lora_a[0][1].fill_(float("nan"))

    weights.reset_slot(1)

    assert weights.slot_ranks == [(2, 0), (0, 0), (0, 0)]
    assert not weights.lora_a[0][1].any()
    assert not weights.lora_b[1][1].any()
    assert torch.equal(weights.lora_b[0][0, :, :2], kept[1])


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_out_of_range_is_refused(slot: int) -> None:
    with pytest.raises(KernelArgumentError, match=r"expected 0\.\.2"):
        allocate().write_slot(slot, [None, None])
    with pytest.raises(KernelArgumentError, match=r"expected 0\.\.2"):
        allocate().reset_slot(slot)


def test_a_wrong_number_of_slices_is_refused() -> None:
    with pytest.raises(KernelArgumentError, match="1 slices given, expected 2"):
        allocate().write_slot(0, [None])


def test_all_wrong_slices_are_named_and_the_slot_stays() -> None:
    weights = allocate()
    kept = pair(2, 4)
    weights.write_slot(0, [kept, None])

    with pytest.raises(UnsupportedShapeError) as refusal:
        weights.write_slot(0, [pair(9, 4), (torch.ones(2, 5), torch.ones(3, 2))])

    assert "slice 0 has rank 9, expected 1..8" in str(refusal.value)
    assert "slice 1 is lora_a [2, 5] and lora_b [3, 2], expected [r, 5] and [2, r]" in str(
        refusal.value
    )
    assert torch.equal(weights.lora_a[0][0, :2], kept[0])


@pytest.mark.parametrize("bad", [(torch.ones(0, 5), torch.ones(4, 0)), (torch.tensor(1.0),) * 2])
def test_pairs_without_rank_are_refused(bad: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(UnsupportedShapeError, match="slice 0"):
        allocate().write_slot(0, [bad, None])


@pytest.mark.parametrize(
    "change",
    [
        {"num_slots": 0},
        {"max_rank": 0},
        {"in_features": -1},
        {"out_features": ()},
        {"out_features": (4, 0)},
        {"dtype": torch.int8},
        {"dtype": torch.float64},
    ],
)
def test_allocate_refuses_impossible_sizes_and_dtypes(change: dict[str, Any]) -> None:
    with pytest.raises(KernelArgumentError, match="stacked weights"):
        allocate(**change)


def test_repr_names_the_sizes() -> None:
    assert "num_slots=3, max_rank=8, in_features=5, out_features=[4, 2]" in repr(allocate())
