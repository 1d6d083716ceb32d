"""Rows of projections that a checkpoint stores as one, read from its configuration."""

from __future__ import annotations

from transformers import GPT2Config, Phi3Config

from lora_server.model.families import fused_modules


def test_grouped_query_attention_has_narrower_keys_and_values() -> None:
    config = Phi3Config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96
    )

    assert fused_modules(config) == {
        "qkv_proj": {"q_proj": 64, "k_proj": 32, "v_proj": 32},
        "gate_up_proj": {"gate_proj": 96, "up_proj": 96},
    }


def test_parts_keep_the_order_of_the_rows() -> None:
    found = fused_modules(Phi3Config())

    assert list(found["qkv_proj"]) == ["q_proj", "k_proj", "v_proj"]
    assert list(found["gate_up_proj"]) == ["gate_proj", "up_proj"]


def test_a_family_without_such_sizes_has_no_such_parts() -> None:
    assert "gate_up_proj" not in fused_modules(GPT2Config())
