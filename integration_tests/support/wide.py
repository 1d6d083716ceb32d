"""A wide, shallow Llama with random weights, and adapters as large as one asks for.

Large enough that a step reads hundreds of megabytes, as real ones do; made in seconds. Nobody reads
what it says.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from support.adapters import CONFIG, WEIGHTS
from support.checkpoints import build_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 1024, 2816, 12, 16, 8, 64
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD_DIM),
    "self_attn.k_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "self_attn.v_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "self_attn.o_proj": (HEADS * HEAD_DIM, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
"""Module of a layer -> (in, out)."""

BYTES_PER_RANK = LAYERS * 4 * sum(sum(sizes) for sizes in LINEARS.values())
"""Bytes of a float32 adapter of rank 1 on all linear modules."""


def save_wide_model(folder: Path) -> None:
    """Write the checkpoint, float32, with a tokenizer that reads any text."""
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_wide_adapter(folder: Path, *, rank: int, seed: int) -> int:
    """Write an adapter of all linear modules; return its bytes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name, (num_in, num_out) in LINEARS.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn(rank, num_in, generator=generator) * 0.02
            b = torch.randn(num_out, rank, generator=generator) * 0.02
            tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"] = a, b
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    modules = sorted(name.rpartition(".")[2] for name in LINEARS)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (folder / CONFIG).write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in tensors.values())
