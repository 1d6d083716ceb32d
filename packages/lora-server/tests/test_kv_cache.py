"""The memory of the KV cache: what is handed out ahead of use changes nothing that was written."""

from __future__ import annotations

import sys

import pytest
import torch

from lora_server.model.kv_cache import KvCache, KvShape

MIB = 1024**2


def make(num_blocks: int) -> KvCache:
    shape = KvShape(num_kv_heads=4, head_dim=64, value_head_dim=64)
    return KvCache(
        {0: shape, 3: shape},
        num_blocks=num_blocks,
        block_size=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_populating_keeps_what_was_written() -> None:
    cache = make(num_blocks=64)
    for layer in cache.layers.values():
        layer[5] = 7.0
    cache.populate(cache.size_bytes * 2)
    for layer in cache.layers.values():
        assert bool((layer[5] == 7.0).all())
        assert not layer[torch.arange(64) != 5].any()


if sys.platform == "linux":

    def resident_bytes() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - no file of disk
            return int(file.read().split()[1]) * 4096

    @pytest.mark.parametrize("share", [0.25, 1.0])
    def test_populating_takes_the_memory_that_it_was_told_to(share: float) -> None:
        cache = make(num_blocks=1024)  # 64 MiB
        before = resident_bytes()
        cache.populate(int(cache.size_bytes * share))
        taken = resident_bytes() - before
        assert abs(taken - cache.size_bytes * share) < 4 * MIB
