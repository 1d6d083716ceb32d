"""How the KV cache is cut."""

from __future__ import annotations

from typing import Any

import pytest

from lora_server.errors import StartupError
from lora_server.memory import free_host_bytes, plan_kv

COMMON: dict[str, Any] = {
    "token_bytes": 100,
    "block_size": 16,
    "context_length": 512,
    "max_model_len": None,
    "max_num_seqs": 4,
    "memory_bytes": None,
    "default_bytes": 10**9,
}


def test_takes_no_more_than_the_sequences_can_use() -> None:
    budget = plan_kv(**COMMON)

    assert budget.num_blocks == 512 // 16 * 4
    assert budget.max_model_len == 512


def test_little_memory_shortens_the_longest_sequence() -> None:
    budget = plan_kv(**COMMON | {"default_bytes": 16 * 100 * 10 + 7})

    assert budget.num_blocks == 10
    assert budget.max_model_len == 160


def test_a_given_size_is_used_whole() -> None:
    budget = plan_kv(**COMMON | {"memory_bytes": 16 * 100 * 33 + 5})

    assert budget.num_blocks == 33
    assert budget.num_tokens == 33 * 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_model_len": 600}, "--max-model-len is 600, the model was made for 512"),
        ({"max_model_len": 512, "memory_bytes": 16_000}, "holds 160 tokens"),
        ({"memory_bytes": 100}, "holds 0 tokens"),
    ],
)
def test_what_cannot_hold_is_refused_with_the_numbers(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        plan_kv(**COMMON | change)


def test_this_machine_has_free_memory() -> None:
    assert free_host_bytes() > 2**20
