"""Many small tensors in one copy."""

from __future__ import annotations

import pytest
import torch

from lora_kernels.transfer import ALIGNMENT, copy_together, offsets_of, pack, view_packed

TENSORS = [
    torch.arange(5, dtype=torch.int64),
    torch.zeros(0, dtype=torch.int32),
    torch.arange(6, dtype=torch.int32).view(3, 2),
    torch.tensor([0.5, -1.0, 3.0]),
]


def test_what_is_packed_comes_back_at_aligned_places() -> None:
    offsets, size = offsets_of(TENSORS)

    parts = view_packed(pack(TENSORS, pin=False), offsets, TENSORS)

    for part, tensor in zip(parts, TENSORS, strict=True):
        assert torch.equal(part, tensor)
        assert part.dtype == tensor.dtype
    assert all(offset % ALIGNMENT == 0 for offset in [*offsets, size])
    assert len({part.untyped_storage()._cdata for part in parts}) == 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_copies_share_one_storage_on_the_device(device: str) -> None:
    parts = copy_together(TENSORS, torch.device(device))

    assert [part.shape for part in parts] == [tensor.shape for tensor in TENSORS]
    assert {part.device.type for part in parts} == {device}
    assert len({part.untyped_storage()._cdata for part in parts}) == 1
