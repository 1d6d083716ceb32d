"""The bases of the table: tiny random models that differ in how they store their projections.

Letters: `B` sequences, `S` tokens a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn
    from transformers import PreTrainedConfig

VOCAB, HIDDEN, INNER = 96, 64, 128
_LLAMA_LIKE: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """One kind of base model, and what its modules are called."""

    name: str
    config: Callable[[], PreTrainedConfig]
    attention: tuple[str, ...]
    """Linear modules of the attention."""
    feed_forward: tuple[str, ...]
    """Linear modules of the feed-forward block; empty where it consists of experts."""
    saved: str = "o_proj"
    """A projection that the attention's targets are not needed for."""
    embedding: str = "embed_tokens"
    head: str = "lm_head"
    is_classifier: bool = False
    task: str = "CAUSAL_LM"
    packed_modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused_modules: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    logits_modules: frozenset[str] = frozenset({"lm_head"})
    experts: tuple[str, ...] = ()
    """Parameters of the experts that PEFT's `target_parameters` can name."""

    @property
    def linears(self) -> tuple[str, ...]:
        """All linear modules inside a layer."""
        return self.attention + self.feed_forward

    def build(self) -> nn.Module:
        """Return the base in float32, weights wide enough that adapters are not lost in noise."""
        torch.manual_seed(0)
        kind = AutoModelForSequenceClassification if self.is_classifier else AutoModelForCausalLM
        create: Any = kind.from_config
        model: nn.Module = create(self.config(), attn_implementation="eager")
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.15, generator=generator)
            elif name.endswith("bias"):
                parameter.data.normal_(std=0.1, generator=generator)
        return model.float().eval().requires_grad_(requires_grad=False)


def _llama(*, tied: bool) -> Callable[[], PreTrainedConfig]:
    return lambda: LlamaConfig(**_LLAMA_LIKE, tie_word_embeddings=tied, attention_bias=True)


_SPLIT = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}

BASES: Mapping[str, Base] = {
    base.name: base
    for base in (
        Base(
            name="Llama",
            config=_llama(tied=False),
            attention=("q_proj", "k_proj", "v_proj", "o_proj"),
            feed_forward=("gate_proj", "up_proj", "down_proj"),
            packed_modules=_SPLIT,
        ),
        Base(
            name="Llama, tied head",
            config=_llama(tied=True),
            attention=("q_proj", "k_proj", "v_proj", "o_proj"),
            feed_forward=("gate_proj", "up_proj", "down_proj"),
            packed_modules=_SPLIT,
        ),
        Base(
            name="GPT-2",
            config=lambda: GPT2Config(
                vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, n_inner=64
            ),
            attention=("c_attn",),
            feed_forward=("c_fc",),
            saved="c_fc",
            embedding="wte",
        ),
        Base(
            name="Phi-3",
            config=lambda: Phi3Config(**_LLAMA_LIKE, tie_word_embeddings=False),
            attention=("qkv_proj", "o_proj"),
            feed_forward=("gate_up_proj", "down_proj"),
            fused_modules={
                "qkv_proj": {"q_proj": 64, "k_proj": 32, "v_proj": 32},
                "gate_up_proj": {"gate_proj": INNER, "up_proj": INNER},
            },
        ),
        Base(
            name="BERT",
            config=lambda: BertConfig(
                vocab_size=VOCAB,
                hidden_size=HIDDEN,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=INNER,
                max_position_embeddings=64,
                num_labels=3,  # type: ignore[call-arg]  # of every configuration
            ),
            attention=("query", "key", "value"),
            feed_forward=("intermediate.dense",),
            saved="intermediate.dense",
            embedding="word_embeddings",
            head="classifier",
            is_classifier=True,
            task="SEQ_CLS",
            packed_modules={"qkv_proj": ("query", "key", "value")},
            # Both see one row a sequence, not one a token.
            logits_modules=frozenset({"classifier", "bert.pooler.dense"}),
        ),
        Base(
            name="Mixtral",
            config=lambda: MixtralConfig(
                **_LLAMA_LIKE, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
            ),
            attention=("q_proj", "k_proj", "v_proj", "o_proj"),
            feed_forward=(),
            packed_modules=_SPLIT,
            experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        ),
    )
}
