"""What slots take is told module by module, and a model on `meta` tells the same as a real one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from lora_layers import LoraModelConfig, LoraModelManager, StackForm
from lora_layers.testing import LINEARS, PACKED_MODULES, BuiltAdapter, TinyDecoder, build_adapter
from lora_layers.wrappers.base_linear import can_prepack

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = LoraModelConfig(max_loras=3, max_lora_rank=5, packed_modules=PACKED_MODULES)


def on_meta(dtype: torch.dtype = torch.float32) -> TinyDecoder:
    """Return the decoder without numbers."""
    return TinyDecoder().to("meta", dtype)


def test_every_module_is_listed_once_with_the_bytes_of_its_sizes() -> None:
    manager = LoraModelManager(TinyDecoder(), CONFIG)

    found = {stack.path: stack for stack in manager.memory()}

    assert {path for stack in found.values() for path in stack.member_paths} == {
        *LINEARS,
        "embed_tokens",
    }
    packed = found["layers.0.attn.qkv_proj"]
    assert packed.rank_bytes == (4 * (16 + 16), 4 * (16 + 8), 4 * (16 + 8))
    assert sum(packed.rank_bytes) * 3 * 5 <= packed.nbytes <= sum(packed.rank_bytes) * 3 * 5 + 256
    forms = {path: stack.form for path, stack in found.items()}
    assert forms["embed_tokens"] is StackForm.EMBEDDING
    assert forms["lm_head"] is StackForm.LOGITS
    assert forms["layers.1.mlp.down_proj"] is StackForm.LINEAR


def test_a_model_without_numbers_is_wrapped_and_tells_the_same_bytes() -> None:
    real = LoraModelManager(TinyDecoder(), CONFIG)

    planned = LoraModelManager(on_meta(), CONFIG)

    assert planned.buffer_bytes == real.buffer_bytes
    assert [(s.path, s.form, s.nbytes, s.rank_bytes, s.affine_bytes) for s in planned.memory()] == [
        (s.path, s.form, s.nbytes, s.rank_bytes, s.affine_bytes) for s in real.memory()
    ]
    tensors = [tensor for stack in planned.memory() for tensor in stack.tensors]
    assert all(tensor.is_meta for tensor in tensors)
    assert planned.report == real.report


def test_a_slot_tells_the_true_ranks_of_what_it_holds(built: BuiltAdapter) -> None:
    manager = LoraModelManager(TinyDecoder(), CONFIG)
    manager.register("a", manager.prepare(built.adapter))
    manager.activate("a")

    slot = manager.slot_of("a")
    assert slot is not None
    used = sum(stack.used_bytes(stack.slot_ranks[slot]) for stack in manager.memory())

    assert used == sum(
        4 * (pair.numel())
        for part in built.adapter.parts.values()
        if part.pair is not None
        for pair in (part.pair.lora_a, part.pair.lora_b)
    )
    others = [ranks for s in manager.memory() for i, ranks in enumerate(s.slot_ranks) if i != slot]
    assert all(not any(ranks) for ranks in others)


@pytest.fixture
def built(tmp_path: Path) -> BuiltAdapter:
    """Build an adapter of rank 3 for two modules."""
    return build_adapter(tmp_path, ["layers.0.attn.q_proj", "layers.1.mlp.down_proj"], r=3)


def test_copies_in_another_layout_are_counted_and_planned() -> None:
    config = LoraModelConfig(packed_modules=PACKED_MODULES, prepack_linear=True)
    real = LoraModelManager(TinyDecoder().to(torch.bfloat16), config)

    planned = LoraModelManager(on_meta(dtype=torch.bfloat16), config)

    assert planned.prepacked_bytes == real.prepacked_bytes
    expected = 2 * sum(i * o for i, o in LINEARS.values())
    can = can_prepack(nn.Linear(1, 1).to(torch.bfloat16).weight)
    assert real.prepacked_bytes == (expected if can else 0)


def test_floats_of_32_bits_have_no_copies() -> None:
    config = LoraModelConfig(packed_modules=PACKED_MODULES, prepack_linear=True)

    assert LoraModelManager(TinyDecoder(), config).prepacked_bytes == 0
