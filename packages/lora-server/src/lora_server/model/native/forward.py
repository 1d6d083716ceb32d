"""NativeForward: a causal language model of Llama's form, from token ids to logits.

One native call does all but the head. What a step needs beyond it goes through the model's own
forward, whose parts have fast forms of their own.

Letters: `T` rows, `S` rows that reach the logits, `D` hidden width, `V` vocabulary.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.modeling_outputs import CausalLMOutput

from lora_layers import EmbeddingParts, embedding_parts, linear_parts
from lora_server.model.greedy import Largest

from .angles import AngleTable, is_static
from .layers import RmsNorm

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from .decoder import DecoderStack

_CHILDREN = {"embed_tokens", "layers", "norm", "rotary_emb"}


class _Model(ctypes.Structure):
    """`Model` of decoder.cpp."""

    _fields_ = (
        ("embedding", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("vocabulary", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
    )


class _Tokens(ctypes.Structure):
    """`Tokens` of decoder.cpp."""

    _fields_ = (
        ("token_ids", ctypes.c_void_p),
        ("embedded", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("num_kept", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """What a model of Llama's form has around its layers."""

    embed_tokens: nn.Module
    embedding: EmbeddingParts
    """Of `embed_tokens`."""
    norm: nn.Module
    rotary: nn.Module
    head: nn.Module
    """Maps `[1, S, D]` to `[1, S, V]`."""


def find_model_parts(model: Any, dtype: torch.dtype) -> ModelParts | None:
    """Return the parts of a model whose children are those of Llama's; None for any other."""
    base, head = getattr(model, "base_model", None), model.get_output_embeddings()
    if base is None or base is model or head is None:
        return None
    if {name for name, _ in base.named_children()} != _CHILDREN:
        return None
    embedding = embedding_parts(base.embed_tokens)
    if embedding is None or embedding.weight.dtype is not dtype or not is_static(base.rotary_emb):
        return None
    if not isinstance(base.norm.forward, RmsNorm) or base.norm.weight.dtype is not dtype:
        return None
    return ModelParts(
        embed_tokens=base.embed_tokens,
        embedding=embedding,
        norm=base.norm,
        rotary=base.rotary_emb,
        head=head,
    )


class NativeForward:
    """The forward of one model."""

    def __init__(
        self,
        parts: ModelParts,
        stack: DecoderStack,
        run: Callable[..., int],
        original: Callable[..., Any],
    ) -> None:
        """Take the model's parts, which must stay what and where they are.

        Args:
            parts: what is around the layers.
            stack: all layers.
            run: `decoder_model` of decoder.cpp.
            original: the model's own forward, for what the kernel does not take.
        """
        norm, weight = cast("Any", parts.norm), parts.embedding.weight
        self._parts = parts
        self._head = linear_parts([parts.head])
        """None where the head's product is none of the kernels'."""
        self._stack = stack
        self._run = run
        self._original = original
        self._angles = AngleTable(parts.rotary, stack.head_width)
        self._model = _Model(
            embedding=weight.data_ptr(),
            norm=norm.weight.data_ptr(),
            vocabulary=weight.shape[0],
            hidden=stack.hidden_width,
            width=stack.head_width,
            epsilon=norm.variance_epsilon,
        )
        self._tokens = _Tokens()
        self._addresses = ctypes.addressof(self._model), ctypes.addressof(self._tokens)

    def __call__(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        position_ids: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **options: Any,
    ) -> Any:
        """Map ids `[1, T]` to logits `[1, S, V]`; all arguments are transformers'.

        Args:
            input_ids: int64.
            position_ids: as the ids.
            use_cache: the kernel takes False only: keys and values are in the paged store.
            logits_to_keep: `[S]` int64 rows, or 0 for all of them.
            options: none, for the kernel.
        """
        if (
            input_ids is not None
            and position_ids is not None
            and use_cache is False
            and not options
        ):
            states = self._run_native(input_ids, position_ids, logits_to_keep)
            if states is not None:
                return CausalLMOutput(logits=self._parts.head(states))
        return self._original(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **options,
        )

    def largest(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, kept: torch.Tensor
    ) -> Largest | None:
        """Choose the largest logit of rows; the logits themselves are not written.

        Args:
            input_ids: `[1, T]` int64.
            position_ids: `[1, T]` int64.
            kept: `[S]` int64 rows.

        Returns:
            None where the kernels do not take the step.
        """
        head = self._head
        if head is None or not head.is_plain:
            return None
        states = self._run_native(input_ids, position_ids, kept)
        return None if states is None else Largest(*head.product.largest(states[0]))

    def _run_native(
        self, ids: torch.Tensor, positions: torch.Tensor, kept: int | torch.Tensor
    ) -> torch.Tensor | None:
        """Return the states `[1, S, D]` that reach the head."""
        num_rows = ids.shape[-1]
        if not isinstance(kept, torch.Tensor):
            if kept:
                return None
            kept = torch.arange(num_rows)
        is_right = all(part.dtype is torch.int64 for part in (ids, positions, kept))
        if not is_right or not ids.shape == positions.shape == (1, num_rows) or not num_rows:
            return None
        addresses = self._stack.addresses(num_rows)
        if addresses is None:
            return None
        tokens, held = self._tokens, [ids.contiguous(), positions.contiguous(), kept.contiguous()]
        tokens.token_ids, tokens.positions, tokens.kept = (part.data_ptr() for part in held)
        tokens.num_kept = len(kept)
        tokens.embedded = None
        if not self._parts.embedding.is_plain:
            held.append(self._parts.embed_tokens(ids).contiguous())
            tokens.embedded = held[-1].data_ptr()
        tokens.cosine, tokens.sine = self._angles.addresses(int(positions.max()) + 1)
        out = torch.empty(1, len(kept), self._stack.hidden_width, dtype=torch.bfloat16)
        model, tokens_at = self._addresses
        layers, step = addresses
        is_unknown = self._run(model, layers, len(self._stack), step, tokens_at, out.data_ptr())
        if is_unknown:
            return None
        self._stack.num_calls += 1
        return out
