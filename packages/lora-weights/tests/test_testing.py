"""The builders other packages test with make valid, reproducible adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_weights import load_adapter
from lora_weights.testing import build_raw_adapter, llama_modules, write_adapter

if TYPE_CHECKING:
    from pathlib import Path


def test_one_seed_is_one_adapter_and_another_seed_another(tmp_path: Path) -> None:
    digests = [
        load_adapter(write_adapter(tmp_path / str(i), llama_modules(), seed=seed)).digest
        for i, seed in enumerate([1, 1, 2])
    ]

    assert digests[0] == digests[1] != digests[2]


def test_alpha_is_twice_the_rank_unless_given(tmp_path: Path) -> None:
    doubled = load_adapter(write_adapter(tmp_path / "a", {"q": (8, 8)}, r=3))
    given = load_adapter(write_adapter(tmp_path / "b", {"q": (8, 8)}, r=3, alpha=1))

    assert (doubled.config.lora_alpha, given.config.lora_alpha) == (6, 1)


def test_shapes_follow_the_modules_and_rank_patterns() -> None:
    raw = build_raw_adapter(
        {"a.q": (8, 6), "a.k": (8, 4)}, r=2, embeddings={"e": (9, 8)}, rank_pattern={"q": 5}
    )

    shapes = {
        key.removeprefix("base_model.model."): tuple(t.shape) for key, t in raw.tensors.items()
    }
    assert shapes == {
        "a.q.lora_A.weight": (5, 8),
        "a.q.lora_B.weight": (6, 5),
        "a.k.lora_A.weight": (2, 8),
        "a.k.lora_B.weight": (4, 2),
        "e.lora_embedding_A": (2, 9),
        "e.lora_embedding_B": (8, 2),
    }


def test_no_factor_is_zero() -> None:
    tensors = build_raw_adapter(llama_modules(), dtype=torch.bfloat16).tensors.values()

    assert all(tensor.any() and tensor.dtype == torch.bfloat16 for tensor in tensors)


def test_llama_modules_have_seven_projections_a_layer() -> None:
    modules = llama_modules(num_layers=3, hidden=64, inter=128, kv=32)

    assert len(modules) == 21
    assert modules["model.layers.2.self_attn.v_proj"] == (64, 32)
    assert modules["model.layers.2.mlp.down_proj"] == (128, 64)
