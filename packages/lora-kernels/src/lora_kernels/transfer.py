"""Copies of many small tensors to a device as one transfer that nobody waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

ALIGNMENT = 16
"""Bytes. Triton compiles a kernel anew when a pointer stops being a multiple of this."""


def offsets_of(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return where each tensor begins in a packed buffer, in bytes, and the size of it."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def view_packed(packed: Tensor, offsets: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a packed `uint8` buffer, with dtypes and shapes of `like`."""
    return [
        packed[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for offset, tensor in zip(offsets, like, strict=True)
    ]


def pack(tensors: Sequence[Tensor], *, pin: bool) -> Tensor:
    """Copy host tensors into one `uint8` buffer, page-locked if asked.

    torch's allocator of page-locked memory hands a buffer out again only when copies from it are
    done, so the caller may drop it at once.
    """
    offsets, size = offsets_of(tensors)
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    for part, tensor in zip(view_packed(packed, offsets, tensors), tensors, strict=True):
        part.copy_(tensor)
    return packed


def copy_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy host tensors to `device` in one transfer, without synchronisation where it can be."""
    packed = pack(tensors, pin=device.type == "cuda").to(device, non_blocking=True)
    return view_packed(packed, offsets_of(tensors)[0], tensors)
