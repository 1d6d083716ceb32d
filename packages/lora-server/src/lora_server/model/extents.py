"""Where tensors lie: bytes that several of them share are counted once.

A tensor of a model is often a view: tied weights, members of a packed weight, a file mapped as a
whole. Works for tensors on `meta` too, whose storages are told apart without having addresses.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

Range = tuple[int, int]
"""First byte and one past the last."""


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that the tensors take together."""
    return sum(end - start for _, ranges in _extents(tensors) for start, end in ranges)


def address_ranges(tensors: Iterable[torch.Tensor]) -> list[Range]:
    """Return the addresses in host memory that the tensors take, apart from each other."""
    return [
        (storage.data_ptr() + start, storage.data_ptr() + end)
        for storage, ranges in _extents(tensors)
        if storage.device.type == "cpu"
        for start, end in ranges
    ]


def _extents(
    tensors: Iterable[torch.Tensor],
) -> list[tuple[torch.UntypedStorage, list[Range]]]:
    """Group the tensors by storage; return each with the ranges of it that are used."""
    storages: dict[int, torch.UntypedStorage] = {}
    ranges: dict[int, list[Range]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - on meta nothing else tells storages apart
        storages[key] = storage
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        length = 1 + sum((int(size) - 1) * int(stride) for size, stride in steps)
        start = int(tensor.storage_offset()) * tensor.itemsize
        ranges[key].append((start, start + length * tensor.itemsize))
    return [(storages[key], _merge(found)) for key, found in ranges.items()]


def _merge(ranges: list[Range]) -> list[Range]:
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
