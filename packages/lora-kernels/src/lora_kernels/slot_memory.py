"""Host memory for slots, in huge pages where the system has them.

A step with few tokens reads all of its adapters' A and B once, along many rows at a time. With
pages of 4 KiB an address has to be looked up for every 64 lines of each of them, and eight adapters
took twice the time. Storages lie side by side in large pieces, since most are smaller than a huge
page.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
import weakref
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

PIECE_BYTES = 64 << 20
"""A piece is address space; memory is taken page by page as slots are written."""

MIN_BYTES = 64 << 10
"""Smaller storages stay in the caches whatever their pages are."""

_HUGE_PAGE = 2 << 20
_ALIGNMENT = 4096


class SlotMemory:
    """Hands out parts of large pieces, each once. A piece is freed with the last tensor in it.

    Every tensor has a storage of its own, so that torch counts its writes alone.
    """

    def __init__(self) -> None:
        """Start without a piece."""
        self._lock = threading.Lock()
        self._piece: weakref.ref[mmap.mmap] | None = None
        self._num_used = 0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros that nothing else shares."""
        count = prod(shape)
        num_bytes = count * dtype.itemsize
        if sys.platform != "linux" or num_bytes < MIN_BYTES:
            return torch.zeros(tuple(shape), dtype=dtype)
        with self._lock:
            piece, begin = self._take(num_bytes)
        return torch.frombuffer(piece, dtype=dtype, count=count, offset=begin).view(tuple(shape))

    def _take(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        piece = None if self._piece is None else self._piece()
        if piece is None or self._num_used + num_bytes > len(piece):
            piece = _map(max(num_bytes, PIECE_BYTES) + _HUGE_PAGE)
            start = torch.frombuffer(piece, dtype=torch.uint8, count=1).data_ptr()
            self._piece, self._num_used = weakref.ref(piece), -start % _HUGE_PAGE
        begin = self._num_used
        self._num_used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return piece, begin


@lru_cache(maxsize=1)
def slot_memory() -> SlotMemory:
    """Return the process's one: slots of all modules lie side by side."""
    return SlotMemory()


def _map(num_bytes: int) -> mmap.mmap:
    if sys.platform != "linux":
        raise AssertionError(sys.platform)
    piece = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages keeps its own
        piece.madvise(mmap.MADV_HUGEPAGE)
    return piece
