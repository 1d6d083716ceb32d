"""One wrapped decoder and two adapters of unequal rank; every test runs without gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from lora_layers import LoraModelConfig, LoraModelManager
from lora_layers.testing import PACKED_MODULES, BuiltAdapter, TinyDecoder, build_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def model() -> TinyDecoder:
    """Return a fresh decoder."""
    return TinyDecoder()


@pytest.fixture
def manager(model: TinyDecoder) -> LoraModelManager:
    """Return a manager over `model` with three slots and packed modules."""
    config = LoraModelConfig(max_loras=3, max_lora_rank=8, packed_modules=PACKED_MODULES)
    return LoraModelManager(model, config)


@pytest.fixture
def sql(tmp_path: Path) -> BuiltAdapter:
    """Return a rank-4 adapter of all modules."""
    return build_adapter(tmp_path / "sql", r=4, seed=1)


@pytest.fixture
def chat(tmp_path: Path) -> BuiltAdapter:
    """Return a rank-7 adapter of q_proj, down_proj and nothing else."""
    paths = ["layers.0.attn.q_proj", "layers.1.mlp.down_proj"]
    return build_adapter(tmp_path / "chat", paths, r=7, seed=2)
