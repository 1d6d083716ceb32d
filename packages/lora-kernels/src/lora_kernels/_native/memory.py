"""Memory for packed weights, in huge pages where the system has them.

A product with few rows reads every weight once, at the memory's speed, and pages of 4 KiB cost a
fifth of it: addresses are looked up, and the processor's prefetcher starts again, at each border.
Weights lie side by side in large pieces, so that small ones share a huge page.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HUGE_PAGE = 2 << 20
PIECE_BYTES = 64 << 20
"""A piece is address space; memory is taken page by page as weights are written."""

MIN_BYTES = 256 << 10
"""Smaller weights stay in the caches whatever their pages are, and would take a huge one alone."""

_ALIGNMENT = 4096


class WeightMemory:
    """Hands out parts of large pieces. A piece is freed with the last weight in it."""

    def __init__(self, advise: Callable[[int, int], None]) -> None:
        """Start without a piece.

        Args:
            advise: tells the system, by address and bytes, that huge pages are wanted there.
        """
        self._advise = advise
        self._lock = threading.Lock()
        self._piece: weakref.ref[Tensor] | None = None
        self._num_used = 0

    def allocate(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        """Return memory of a size, not initialised, and what must live as long as it is used."""
        if num_bytes < MIN_BYTES:
            memory = torch.empty(num_bytes, dtype=torch.uint8)
            return memory, memory
        with self._lock:
            piece = None if self._piece is None else self._piece()
            if piece is None or self._num_used + num_bytes > piece.numel():
                piece = self._make_piece(max(num_bytes, PIECE_BYTES))
            begin = self._num_used
            self._num_used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            return piece[begin : begin + num_bytes], piece

    def _make_piece(self, num_bytes: int) -> Tensor:
        memory = torch.empty(num_bytes + HUGE_PAGE, dtype=torch.uint8)
        begin = -memory.data_ptr() % HUGE_PAGE
        piece = memory[begin : begin + num_bytes]
        self._advise(piece.data_ptr(), num_bytes)
        self._piece, self._num_used = weakref.ref(piece), 0
        return piece
