"""The paged key and value store of a model: one tensor a layer, cut into blocks of tokens.

Which block belongs to which sequence is not known here.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What one attention layer keeps for a token."""

    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    """Differs from `head_dim` in DeepSeek's latent attention."""

    @property
    def width(self) -> int:
        """Numbers kept for a head's key, and for its value: the narrower one is padded."""
        return max(self.head_dim, self.value_head_dim)

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's key and value."""
        return 2 * self.num_kv_heads * self.width * dtype.itemsize


class KvCache:
    """Keys and values of every attention layer.

    `[num_blocks, block_size, 2, kv heads, head width]` each.
    """

    def __init__(
        self,
        shapes: Mapping[int, KvShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = {
            layer: _lazy_zeros(
                (num_blocks, block_size, 2, shape.num_kv_heads, shape.width), dtype, device
            )
            for layer, shape in shapes.items()
        }

    @property
    def size_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers.values())

    def write(
        self, layer: int, token_slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store a step's keys and values.

        Args:
            layer: index of the attention layer.
            token_slots: `[T]` int64, `block * block_size + offset` of each token.
            key: `[T, kv heads, head width]`.
            value: `[T, kv heads, head width]`.
        """
        store = self.layers[layer]
        flat = store.view(-1, *store.shape[2:])
        flat.index_copy_(0, token_slots, torch.stack((key, value), dim=1))

    def clear(self, blocks: Sequence[int]) -> None:
        """Write zeros over whole blocks in every layer."""
        for layer in self.layers.values():
            layer[list(blocks)] = 0

    def populate(self, num_bytes: int) -> None:
        """Have the system hand out the memory of the first blocks, of so many bytes together.

        Otherwise it does so at the first use of each page, which takes a step of 512 prompt tokens
        a sixth of its time. May run beside steps: what has been written stays. Does nothing where
        the system cannot (Linux before 5.14, other systems, other devices than the CPU).
        """
        count = min(num_bytes * self.num_blocks // max(self.size_bytes, 1), self.num_blocks)
        for layer in self.layers.values():
            if layer.is_cpu:
                _populate(layer.data_ptr(), layer[:count].nbytes)

    def read(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Copy out whole blocks.

        Args:
            layer: index of the attention layer.
            blocks: `[M]` int64 block numbers.

        Returns:
            `[M, block_size, 2, kv heads, head width]`, a copy.
        """
        return self.layers[layer].index_select(0, blocks)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros whose pages the system hands out when they are first written, on a CPU.

    `torch.zeros` writes every page at once, so that a large cache would take its whole size, and
    seconds, before the first request.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


_MADV_POPULATE_WRITE = 23
"""Of madvise(2); Python's `mmap` does not name it."""


def _populate(address: int, num_bytes: int) -> None:
    """Back the whole pages between two addresses; errors mean that it is not done."""
    if sys.platform != "linux":
        return
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_WRITE)
