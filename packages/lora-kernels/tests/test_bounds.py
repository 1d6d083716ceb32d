"""What is known of slots: numbers beyond the limit are noticed, and nothing old is left behind."""

from __future__ import annotations

import pytest
import torch

from lora_kernels import StackedWeights
from lora_kernels.bounds import LIMIT
from lora_kernels.testing import random_weights

BROKEN = [float("nan"), float("inf"), -float("inf"), 2 * LIMIT, -2 * LIMIT]


def two_slots() -> StackedWeights:
    return random_weights(
        [(4, 4), (3, 0)],
        max_rank=8,
        in_features=10,
        out_features=(6, 5),
        dtype=torch.float32,
        generator=torch.Generator().manual_seed(0),
    )


def test_ordinary_slots_and_numbers_at_the_limit_are_moderate() -> None:
    weights = two_slots()
    weights.lora_a[0][0, 0, 0] = LIMIT
    weights.lora_b[0][0, 0, 0] = -LIMIT

    assert weights.bounds.are_moderate()


@pytest.mark.parametrize("number", BROKEN)
@pytest.mark.parametrize("factor", [0, 1])
def test_a_slot_written_with_a_number_beyond_the_limit_is_noticed_until_it_is_rewritten(
    number: float, factor: int
) -> None:
    weights = two_slots()
    weights.bounds.are_moderate()
    pair = [torch.ones(2, 10), torch.ones(5, 2)]
    pair[factor][1, 1] = number

    weights.write_slot(1, [None, (pair[0], pair[1])])
    broken = weights.bounds.are_moderate()
    weights.write_slot(0, [None, None])
    still_broken = weights.bounds.are_moderate()
    weights.reset_slot(1)

    assert not broken
    assert not still_broken
    assert weights.bounds.are_moderate()


@pytest.mark.parametrize("number", BROKEN)
def test_a_number_written_through_a_view_is_noticed_even_beyond_the_rank(number: float) -> None:
    weights = two_slots()
    weights.bounds.are_moderate()

    weights.lora_b[1][1, 4, 7] = number
    weights.write_slot(0, [None, None])

    assert not weights.bounds.are_moderate()


def test_slots_allocated_and_written_in_inference_mode_are_watched_too() -> None:
    with torch.inference_mode():
        weights = two_slots()
        before = weights.bounds.are_moderate()
        weights.lora_a[0][1, 0, 0] = float("nan")
        after = weights.bounds.are_moderate()

    assert (before, after) == (True, False)


def test_nothing_is_claimed_of_tensors_whose_writes_torch_does_not_count() -> None:
    with torch.inference_mode():
        a_storage, b_storage = torch.zeros(4, 1, 2, 3), torch.zeros(4, 2, 5).transpose(0, 1)
        weights = StackedWeights(a_storage, b_storage, (5,))

    assert not weights.bounds.are_moderate()


def test_emptying_a_slot_leaves_zeros_whatever_was_written_and_however() -> None:
    weights = two_slots()
    weights.write_slot(0, [None, (torch.ones(2, 10), torch.ones(5, 2))])
    assert not weights.a_storage[2:, :, 0].any()
    assert not weights.a_storage[:, 0, 0].any()
    assert not weights.b_storage[0, 2:].any()
    # Through a view, beyond the ranks that the slots were known to hold.
    weights.lora_a[0][0, -1] = 5.0
    weights.lora_b[0][1, :, -1] = 5.0
    for slot in (0, 1):
        weights.reset_slot(slot)
        assert not weights.a_storage[:, :, slot].any()
        assert not weights.b_storage[slot].any()
