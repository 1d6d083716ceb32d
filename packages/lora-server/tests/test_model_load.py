"""What a loaded model keeps for a token, and models whose state nobody could page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    NemotronHConfig,
    PreTrainedTokenizerFast,
)

from lora_server.errors import StartupError
from lora_server.model.load import load_model

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": None,
}


def save(config: PreTrainedConfig, folder: Path) -> str:
    """Write a random checkpoint."""
    torch.manual_seed(0)
    create: Any = AutoModelForCausalLM.from_config
    create(config).save_pretrained(folder)
    words = {str(number): number for number in range(32)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    wrap: Any = PreTrainedTokenizerFast
    wrap(tokenizer_object=tokenizer, eos_token="1").save_pretrained(folder)
    return str(folder)


def hybrid(*kinds: str) -> NemotronHConfig:
    """Return a small model whose layers are of the given kinds."""
    return NemotronHConfig(
        **SIZES,
        layers_block_type=list(kinds),
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        n_group=1,
        topk_group=1,
        mamba_num_heads=2,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=8,
    )


def test_every_attention_layer_is_seen_with_its_width(tmp_path: Path) -> None:
    model = load_model(save(LlamaConfig(**SIZES, num_hidden_layers=3), tmp_path), device="cpu")

    assert list(model.kv_shapes) == [0, 1, 2]
    assert {(s.num_kv_heads, s.head_dim) for s in model.kv_shapes.values()} == {(1, 16)}
    assert model.kv_token_bytes == 3 * 2 * 16 * 4


def test_layers_that_only_hold_experts_keep_nothing(tmp_path: Path) -> None:
    folder = save(hybrid("attention", "moe", "attention", "moe"), tmp_path)

    assert list(load_model(folder, device="cpu").kv_shapes) == [0, 2]


def test_a_layer_with_a_state_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = save(hybrid("attention", "mamba"), tmp_path)

    with pytest.raises(StartupError, match="1 of 2 layers keep keys and values; layers with anoth"):
        load_model(folder, device="cpu")
