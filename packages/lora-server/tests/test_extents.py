"""Bytes that several tensors share are counted once, with addresses and without."""

from __future__ import annotations

import pytest
import torch

from lora_server.model.extents import address_ranges, tensor_bytes

DEVICES = ["cpu", "meta"]


@pytest.mark.parametrize("device", DEVICES)
def test_views_of_one_tensor_count_once(device: str) -> None:
    whole = torch.zeros(10, 4, device=device)

    assert tensor_bytes([whole, whole.t(), whole[:5], whole.view(-1)]) == 160
    assert tensor_bytes([whole[:3], whole[2:6]]) == 6 * 16


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_a_storage_that_nobody_uses_are_left_out(device: str) -> None:
    whole = torch.zeros(10, 4, device=device)

    assert tensor_bytes([whole[0], whole[9]]) == 32


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_of_their_own_add_up(device: str) -> None:
    one = torch.zeros(3, dtype=torch.bfloat16, device=device)
    other = torch.zeros(5, dtype=torch.int64, device=device)

    assert tensor_bytes([one, other, one, torch.zeros(0, device=device)]) == 46


def test_addresses_are_those_of_the_numbers() -> None:
    whole = torch.zeros(8)

    assert address_ranges([whole[2:4], torch.zeros(3, device="meta")]) == [
        (whole.data_ptr() + 8, whole.data_ptr() + 16)
    ]
