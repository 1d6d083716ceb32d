"""ExpertWeights: what is written is what the views show, and nothing else remains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lora_kernels import ExpertWeights, KernelArgumentError, UnsupportedShapeError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def allocate(**changes: Any) -> ExpertWeights:
    sizes: dict[str, Any] = {
        "num_slots": 3,
        "num_experts": 4,
        "max_rank": 8,
        "in_features": 10,
        "out_features": (6, 6),
        "dtype": torch.float32,
        "device": "cpu",
    }
    return ExpertWeights.allocate(**{**sizes, **changes})


def draw(experts: int, rank: int, *, in_features: int = 10, out: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(experts, rank, in_features), torch.randn(experts, out, rank)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_written_slot_shows_its_factors_cast_and_padded_with_zeros(dtype: torch.dtype) -> None:
    weights = allocate(dtype=dtype)
    gate, up = draw(4, 3), draw(4, 8)

    weights.write_slot(1, [gate, up])

    assert [list(view.shape) for view in weights.lora_a] == [[3, 4, 8, 10]] * 2
    assert [list(view.shape) for view in weights.lora_b] == [[3, 4, 6, 8]] * 2
    for p, (lora_a, lora_b) in enumerate((gate, up)):
        rank = lora_a.shape[1]
        assert torch.equal(weights.lora_a[p][1, :, :rank], lora_a.to(dtype))
        assert torch.equal(weights.lora_b[p][1, :, :, :rank], lora_b.to(dtype))
        assert not weights.lora_a[p][1, :, rank:].any()
        assert not weights.lora_b[p][1, :, :, rank:].any()
    assert weights.slot_ranks == [(0, 0), (3, 8), (0, 0)]
    assert weights.rank_table.tolist() == [[0, 0], [3, 8], [0, 0]]
    for slot in (0, 2):
        assert not weights.a_storage[slot].any()
        assert not weights.b_storage[slot].any()


def test_nothing_of_the_previous_content_remains() -> None:
    weights = allocate()
    weights.a_storage.fill_(float("nan"))
    weights.b_storage.fill_(float("nan"))
    weights.write_slot(2, [draw(4, 8), draw(4, 8)])

    weights.write_slot(2, [None, draw(4, 2)])

    assert weights.slot_ranks[2] == (0, 2)
    assert not weights.lora_a[0][2].any()
    assert not weights.lora_b[0][2].any()
    assert not weights.lora_a[1][2, :, 2:].any()
    assert not weights.lora_b[1][2, :, :, 2:].any()
    assert weights.a_storage[:2].isnan().all()


def test_a_reset_slot_is_empty() -> None:
    weights = allocate()
    weights.write_slot(0, [draw(4, 8), draw(4, 8)])

    weights.reset_slot(0)

    assert weights.slot_ranks[0] == (0, 0)
    assert weights.rank_table[0].tolist() == [0, 0]
    assert not weights.a_storage.any()
    assert not weights.b_storage.any()


def test_shared_factors_are_stored_once() -> None:
    weights = allocate(is_a_shared=True, out_features=(6,))
    lora_a, lora_b = torch.randn(1, 8, 10), torch.randn(4, 6, 8)

    weights.write_slot(0, [(lora_a, lora_b)])

    assert weights.is_a_shared
    assert not weights.is_b_shared
    assert list(weights.lora_a[0].shape) == [3, 1, 8, 10]
    assert torch.equal(weights.lora_a[0][0], lora_a)
    assert torch.equal(weights.lora_b[0][0], lora_b)


def test_a_shared_factor_is_repeated_where_the_storage_has_every_expert() -> None:
    weights = allocate(out_features=(6,))
    lora_a, lora_b = torch.randn(1, 8, 10), torch.randn(1, 6, 8)

    weights.write_slot(0, [(lora_a, lora_b)])

    assert torch.equal(weights.lora_a[0][0], lora_a.expand(4, -1, -1))
    assert torch.equal(weights.lora_b[0][0], lora_b.expand(4, -1, -1))


@pytest.mark.parametrize(("is_a_shared", "a_experts"), [(False, 4), (True, 1)])
@pytest.mark.parametrize(("is_b_shared", "b_experts"), [(False, 4), (True, 1)])
def test_nbytes_counts_every_byte_of_the_storage(
    is_a_shared: bool, a_experts: int, is_b_shared: bool, b_experts: int
) -> None:
    weights = allocate(dtype=torch.bfloat16, is_a_shared=is_a_shared, is_b_shared=is_b_shared)

    a_bytes = 3 * a_experts * 8 * 2 * 10 * 2
    b_bytes = 3 * b_experts * 8 * 12 * 2
    assert weights.nbytes == a_bytes + b_bytes + 3 * 2 * 4


def test_every_wrong_slice_is_named_and_the_slot_stays() -> None:
    weights = allocate()
    weights.write_slot(0, [draw(4, 2), draw(4, 2)])
    before = weights.a_storage.clone(), weights.b_storage.clone()

    with pytest.raises(UnsupportedShapeError) as raised:
        weights.write_slot(0, [draw(3, 2), (torch.randn(4, 2, 10), torch.randn(4, 6, 3))])

    assert str(raised.value) == (
        "write_slot: slice 0 is lora_a [3, 2, 10] and lora_b [3, 6, 2], "
        "expected [4 or 1, r, 10] and [4 or 1, 6, r]; "
        "slice 1 is lora_a [4, 2, 10] and lora_b [4, 6, 3], "
        "expected [4 or 1, r, 10] and [4 or 1, 6, r]"
    )
    assert torch.equal(weights.a_storage, before[0])
    assert torch.equal(weights.b_storage, before[1])
    assert weights.slot_ranks[0] == (2, 2)


def test_factors_of_every_expert_do_not_fit_a_shared_storage() -> None:
    weights = allocate(is_a_shared=True, out_features=(6,))

    with pytest.raises(UnsupportedShapeError, match=r"expected \[1, r, 10\] and \[4 or 1, 6, r\]"):
        weights.write_slot(0, [draw(4, 2)])


def test_a_rank_beyond_the_largest_is_refused() -> None:
    with pytest.raises(UnsupportedShapeError, match=r"slice 0 has rank 9, expected 1\.\.8"):
        allocate().write_slot(0, [draw(4, 9), None])


@pytest.mark.parametrize("wrong", [torch.randn(2, 10), torch.randn(4, 2, 10, 1)])
def test_a_factor_of_another_dimension_is_refused(wrong: Tensor) -> None:
    with pytest.raises(UnsupportedShapeError, match="slice 1 is lora_a"):
        allocate().write_slot(0, [None, (wrong, torch.randn(4, 6, 2))])


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_out_of_range_is_refused(slot: int) -> None:
    weights = allocate()

    with pytest.raises(KernelArgumentError, match=rf"slot is {slot}, expected 0\.\.2"):
        weights.write_slot(slot, [None, None])
    with pytest.raises(KernelArgumentError, match=rf"slot is {slot}, expected 0\.\.2"):
        weights.reset_slot(slot)


def test_a_wrong_number_of_slices_is_refused() -> None:
    with pytest.raises(KernelArgumentError, match="1 slices given, expected 2"):
        allocate().write_slot(0, [None])


@pytest.mark.parametrize(
    "change",
    [
        {"num_slots": 0},
        {"num_experts": 0},
        {"max_rank": 0},
        {"in_features": 0},
        {"out_features": ()},
        {"out_features": (6, 0)},
        {"dtype": torch.int64},
    ],
)
def test_impossible_sizes_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(KernelArgumentError, match="expert weights: "):
        allocate(**change)


def test_the_representation_names_sizes_and_what_is_shared() -> None:
    assert repr(allocate(is_b_shared=True)) == (
        "ExpertWeights(num_slots=3, num_experts=4, max_rank=8, in_features=10, "
        "out_features=[6, 6], is_a_shared=False, is_b_shared=True, dtype=torch.float32, "
        "device='cpu')"
    )
