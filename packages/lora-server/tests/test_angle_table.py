"""Rotary embeddings read from a table, against the module that filled it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lora_server.model.native.angles import AngleTable, is_static

WIDTH = 32
TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"factor": 4.0},
}


def rotary(kind: str) -> LlamaRotaryEmbedding:
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **TYPES[kind]}
    config = LlamaConfig(
        hidden_size=4 * WIDTH,
        num_attention_heads=4,
        head_dim=WIDTH,
        max_position_embeddings=256,
        rope_parameters=parameters,
    )
    return LlamaRotaryEmbedding(config)


def read(address: int, num_positions: int) -> torch.Tensor:
    """Copy bfloat16 numbers from an address."""
    count = num_positions * WIDTH
    bits = np.ctypeslib.as_array((ctypes.c_int16 * count).from_address(address))
    return torch.from_numpy(bits.copy()).view(torch.bfloat16).view(num_positions, WIDTH)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("most", [7, 5000, 20000])
def test_the_table_holds_what_the_module_gives(kind: str, most: int) -> None:
    module = rotary(kind)
    table = AngleTable(module, WIDTH)
    table.addresses(3)  # so that it has to grow
    positions = torch.tensor([[0, 1, most // 2, most - 1]])
    expected = module(torch.empty(1, 1, WIDTH, dtype=torch.bfloat16), position_ids=positions)

    for address, wanted in zip(table.addresses(most), expected, strict=True):
        assert torch.equal(read(address, most)[positions[0]], wanted[0])


def test_angles_that_change_with_the_longest_sequence_are_told_apart() -> None:
    assert is_static(rotary("llama3"))
    assert not is_static(rotary("dynamic"))
    assert not is_static(torch.nn.Identity())
