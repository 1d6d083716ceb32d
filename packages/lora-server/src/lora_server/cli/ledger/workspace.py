"""How large the temporary tensors of one step become: an estimate from sizes alone.

Letters: `T` tokens of the largest step, `S` sequences, `H` hidden, `W` widest product, `V` logits,
`L` longest context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_server.ledger import WorkspaceLedger
from lora_server.model.planned import widest_output

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig

    from lora_server.config import ServerConfig

_HIDDEN_COPIES = 4
"""Residual, normalised input, attention output and the sum that replaces the residual."""
_WIDE_COPIES = 3
"""Gate, up and their product live together."""
_LOGITS_COPIES = 3
"""float32: the logits cast, their logarithms of probabilities, and what sampling sorts."""
_FLOAT_BYTES = 4
_PADDED_SHARE = 2
"""Batches of decoding sequences are padded to less than twice their blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """What the estimate needs of a model."""

    module: nn.Module
    text_config: PreTrainedConfig
    dtype: torch.dtype
    vocab_size: int
    """Columns of the logits; 0 for a model without."""
    kv_token_bytes: int
    """Over all layers; 0 without a KV cache."""
    num_kv_layers: int
    num_kv_tokens: int
    """Tokens the KV cache holds."""
    max_model_len: int


def estimate_workspace(sizes: StepSizes, config: ServerConfig) -> WorkspaceLedger:
    """Estimate the largest temporary tensors of a step."""
    item = sizes.dtype.itemsize
    tokens = config.max_num_batched_tokens
    sequences = min(config.max_num_seqs, tokens)
    activations = tokens * item * _width(sizes)
    logits = sequences * sizes.vocab_size * (item + _LOGITS_COPIES * _FLOAT_BYTES)
    attention = _attention_bytes(sizes, tokens, sequences)
    return WorkspaceLedger(
        size_bytes=max(activations + attention, logits),
        activations_bytes=activations,
        attention_bytes=attention,
        logits_bytes=logits,
    )


def _width(sizes: StepSizes) -> int:
    """Return the numbers that a token has between the products of one layer."""
    described: Any = sizes.text_config
    hidden = int(described.hidden_size)
    choices = getattr(described, "num_experts_per_tok", None) or 0
    inner = getattr(described, "moe_intermediate_size", None) or getattr(
        described, "intermediate_size", None
    )
    experts = choices * (_WIDE_COPIES * int(inner or 0) + hidden) if choices else 0
    dense = _WIDE_COPIES * widest_output(sizes.module)
    return _HIDDEN_COPIES * hidden + max(dense, experts)


def _attention_bytes(sizes: StepSizes, tokens: int, sequences: int) -> int:
    described: Any = sizes.text_config
    length = sizes.max_model_len
    item = sizes.dtype.itemsize
    if not sizes.num_kv_layers:
        # Texts go through whole: keys and values are the activations', scores are formed at worst.
        return tokens * min(tokens, length) * int(described.num_attention_heads) * item
    layer_bytes = sizes.kv_token_bytes // sizes.num_kv_layers
    gathered = min(sequences * length, _PADDED_SHARE * sizes.num_kv_tokens) * layer_bytes
    mask = tokens * min(length, sizes.num_kv_tokens) * item
    is_formed = getattr(described, "attn_logit_softcapping", None) or any(
        name.endswith("sinks") for name, _ in sizes.module.named_parameters()
    )
    scores = mask // item * _FLOAT_BYTES * int(described.num_attention_heads) if is_formed else 0
    return gathered + mask + scores
