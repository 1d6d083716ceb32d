"""Tiny random float32 checkpoints of real model families, with a tokenizer that reads any text.

The weights are drawn wide enough that the next token is clear: with transformers' own initial
values all logits are nearly equal, and a test of greedy decoding would compare rounding errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from transformers import PreTrainedConfig

CONTEXT_LENGTH = 256
SLIDING_WINDOW = 8
"""Far shorter than the prompts, so that it matters."""

_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _INNER = 64, 2, 4, 2, 16, 96
_SPECIALS = ("<|end|>", "<|start|>")
_TRAINED_ON = ("the answer to the question is written in the text that follows the question",)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family: how to make a tiny one, and what its linear modules are called."""

    name: str
    config: Callable[[Mapping[str, Any]], PreTrainedConfig]
    attention: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    feed_forward: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    embedding: str = "embed_tokens"
    weight_std: float = 0.25
    embedding_std: float = 0.25
    final_norm: float = 0.0
    """Added to the weight of the last norm, for wider logits."""


_GEMMA: Mapping[str, Any] = {
    # Gemma multiplies embeddings by sqrt(hidden) and ties the head to them: at the usual width the
    # last token would always predict itself.
    "embedding_std": 0.04,
    "final_norm": 6.0,
}


def _llama_like(shared: Mapping[str, Any]) -> dict[str, Any]:
    """Spell the sizes as most families do."""
    return {
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": CONTEXT_LENGTH,
        **shared,
    }


_BOTH_KINDS = ["sliding_attention", "full_attention"]

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="llama",
            config=lambda shared: LlamaConfig(**_llama_like(shared), tie_word_embeddings=False),
        ),
        Family(
            name="llama-tied",
            config=lambda shared: LlamaConfig(**_llama_like(shared), tie_word_embeddings=True),
        ),
        Family(
            name="qwen3",
            config=lambda shared: Qwen3Config(**_llama_like(shared), tie_word_embeddings=False),
        ),
        Family(
            name="mistral",
            config=lambda shared: MistralConfig(
                **_llama_like(shared), tie_word_embeddings=False, sliding_window=SLIDING_WINDOW
            ),
        ),
        Family(name="gemma", config=lambda shared: GemmaConfig(**_llama_like(shared)), **_GEMMA),
        Family(
            name="gemma2",
            config=lambda shared: Gemma2Config(
                **_llama_like(shared),
                sliding_window=SLIDING_WINDOW,
                layer_types=_BOTH_KINDS,
                query_pre_attn_scalar=_HEAD_DIM,
                attn_logit_softcapping=5.0,
            ),
            **_GEMMA,
        ),
        Family(
            name="gemma3",
            config=lambda shared: Gemma3TextConfig(
                **_llama_like(shared),
                sliding_window=SLIDING_WINDOW,
                layer_types=_BOTH_KINDS,
                query_pre_attn_scalar=_HEAD_DIM,
            ),
            **_GEMMA,
        ),
        Family(
            name="gpt2",
            config=lambda shared: GPT2Config(
                n_embd=_HIDDEN,
                n_layer=_LAYERS,
                n_head=_HEADS,
                n_positions=CONTEXT_LENGTH,
                **shared,
            ),
            attention=("c_attn", "attn.c_proj"),
            feed_forward=("c_fc", "mlp.c_proj"),
            embedding="wte",
        ),
    )
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer: every text has an encoding, and few tokens are whole words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(_SPECIALS) + 20,
        special_tokens=list(_SPECIALS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINED_ON, trainer)
    fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=_SPECIALS[0]
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def save_checkpoint(family: Family, folder: Path, *, seed: int = 0) -> None:
    """Write a random model of the family, with tokenizer and chat template, into a folder."""
    tokenizer = build_tokenizer()
    end = tokenizer.eos_token_id
    shared = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": end}
    config = family.config({**shared, "pad_token_id": None})
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:  # norms and biases keep their meaning, but not their value
                parameter.add_(noise * 0.1)
            else:
                is_embedding = f"{family.embedding}." in name
                std = family.embedding_std if is_embedding else family.weight_std
                parameter.copy_(noise * std)
            if name == "model.norm.weight":
                parameter.add_(family.final_norm)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
