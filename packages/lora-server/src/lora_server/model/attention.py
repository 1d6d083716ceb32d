"""Attention over paged keys and values, as transformers' attention interface asks for it.

A step is one packed `[1, T]` call: its rows belong to many sequences. Works on any device through
torch's scaled dot-product attention; soft-capped logits and attention sinks, which that has no
argument for, take a plain float32 path. `H` heads, `G` query heads a key head, `D` head width.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention
from transformers import AttentionInterface

from .attention_math import plain_attention
from .kv_cache import KvCache, KvShape
from .native.attention import can_attend, decode_tokens, prefill_chunks, write_tokens

if TYPE_CHECKING:
    from .attention_step import AttentionStep, DecodeGroup, PrefillChunk
    from .native.kernels import LayerKernels

_names = itertools.count()


class PagedAttention:
    """The attention function of one model, and the state its calls share.

    `name` is what the model's `_attn_implementation` must be. Set `step` before each forward.
    While `cache` is None the function only records the shapes it sees (see `probe_shapes`).
    """

    def __init__(self) -> None:
        self.name = f"lora_server_paged_{next(_names)}"
        self.cache: KvCache | None = None
        self.step: AttentionStep | None = None
        self.seen: dict[int, KvShape] = {}
        self.options: dict[int, AttentionOptions] = {}
        """What each layer asks for, as far as its shapes were seen."""
        self.kernels: LayerKernels | None = None
        """Native kernels that store and attend, where they take the layer."""
        AttentionInterface.register(self.name, self)

    def __call__(  # noqa: PLR0917 - transformers calls it by position
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,  # noqa: ARG002 - the step says who sees what
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_unused: Any,
    ) -> tuple[torch.Tensor, None]:
        """Store the step's keys and values, then attend.

        Args:
            module: the attention layer; its `layer_idx` names the layer.
            query: `[1, H, T, D]`.
            key: `[1, kv heads, T, D]`.
            value: `[1, kv heads, T, D]`; its width may be another one.
            attention_mask: always None; what a row may see is in the step.
            scaling: factor on the logits, default `D ** -0.5`.
            sliding_window: keys a query may look back at, itself included.
            softcap: `softcap * tanh(logits / softcap)` when given.
            s_aux: `[H]` attention sinks: one more logit a head that takes weight but has no value.

        Returns:
            `[1, T, H, D]`, as wide as the values, and None for the weights.
        """
        layer = int(module.layer_idx)  # type: ignore[arg-type]  # an int on every layer
        if self.cache is None or self.step is None:
            self.seen[layer] = KvShape(
                num_kv_heads=key.shape[1], head_dim=key.shape[3], value_head_dim=value.shape[3]
            )
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            self.options[layer] = AttentionOptions(scaling, sliding_window, softcap, s_aux)
            rows, heads = query.shape[2], query.shape[1]
            return value.new_zeros((1, rows, heads, value.shape[3])), None
        if key.shape[3] != value.shape[3]:
            width = max(key.shape[3], value.shape[3])
            scaling = query.shape[3] ** -0.5 if scaling is None else scaling
            q, k, v = (_pad(states, width) for states in (query, key, value))
            out, _ = self(module, q, k, v, None, scaling, sliding_window, softcap, s_aux)
            return out[..., : value.shape[3]], None
        cache, step = self.cache, self.step
        key_rows, value_rows = key[0].transpose(0, 1), value[0].transpose(0, 1)
        kernels = self.kernels if can_attend(cache.layers[layer]) else None
        if kernels is not None:
            write_tokens(kernels, cache.layers[layer], step.token_slots, key_rows, value_rows)
        else:
            cache.write(layer, step.token_slots, key_rows, value_rows)
        options = AttentionOptions(
            query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux
        )
        query_rows = query[0].transpose(0, 1)  # [T, H, D]
        if not options.is_plain:
            kernels = None
        if kernels is None and len(step.decode) == 1 and step.decode[0].rows is None:
            return _decode(query_rows, step.decode[0], cache, layer, options).unsqueeze(0), None
        out = torch.empty_like(query_rows, memory_format=torch.contiguous_format)
        for group in step.decode:
            if kernels is not None:
                decode_tokens(
                    kernels,
                    query_rows,
                    out,
                    cache.layers[layer],
                    group,
                    scaling=options.scaling,
                    window=options.window,
                )
                continue
            assert group.rows is not None, "one group of all rows was handled above"
            picked = query_rows.index_select(0, group.rows)
            out.index_copy_(0, group.rows, _decode(picked, group, cache, layer, options))
        if kernels is not None and step.prefill:
            prefill_chunks(
                kernels,
                query_rows,
                out,
                cache.layers[layer],
                step.prefill,
                scaling=options.scaling,
                window=options.window,
            )
            return out.unsqueeze(0), None
        for chunk in step.prefill:
            own = slice(chunk.start, chunk.start + chunk.num_tokens)
            fresh = (key_rows[own], value_rows[own])
            out[own] = _prefill(query_rows[own], fresh, chunk, cache, layer, options)
        return out.unsqueeze(0), None


def _pad(states: torch.Tensor, width: int) -> torch.Tensor:
    """Widen heads with zeros, which change neither a product nor a sum."""
    return F.pad(states, (0, width - states.shape[-1]))


class AttentionOptions:
    """What a layer asks of attention: factor on the logits, window, soft cap, sinks."""

    __slots__ = ("scaling", "sinks", "softcap", "window")

    def __init__(
        self,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        self.scaling = scaling
        self.window = window
        self.softcap = softcap
        self.sinks = sinks

    @property
    def is_plain(self) -> bool:
        """Whether neither a soft cap nor sinks are asked for."""
        return self.softcap is None and self.sinks is None


def _decode(
    query: torch.Tensor, group: DecodeGroup, cache: KvCache, layer: int, options: AttentionOptions
) -> torch.Tensor:
    """One token a sequence: `[B, H, D]` -> `[B, H, D]`."""
    size = group.num_sequences
    stored = cache.read(layer, group.blocks)
    # [B*M, block, 2, kv, D] -> [B, L, 2, kv, D]
    stored = stored.view(size, group.blocks_per_sequence * cache.block_size, *stored.shape[2:])
    key, value = stored[:, :, 0].transpose(1, 2), stored[:, :, 1].transpose(1, 2)
    num_kv = key.shape[1]
    # The query heads of a key head share its keys: they become its query positions.
    grouped = query.reshape(size, num_kv, -1, query.shape[-1])
    bias = group.bias(options.window, key.shape[2], query.dtype)
    if options.is_plain:
        out = F.scaled_dot_product_attention(
            grouped, key, value, attn_mask=bias, scale=options.scaling
        )
    else:
        sinks = None if options.sinks is None else options.sinks.view(1, num_kv, -1, 1)
        out = plain_attention(
            grouped,
            key,
            value,
            bias,
            scaling=options.scaling,
            softcap=options.softcap,
            sinks=sinks,
        )
    return out.reshape(query.shape)


def _prefill(  # noqa: PLR0917 - the layer, the step and the store are three things
    query: torch.Tensor,
    fresh: tuple[torch.Tensor, torch.Tensor],
    chunk: PrefillChunk,
    cache: KvCache,
    layer: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """A chunk of one sequence: `[n, H, D]` -> `[n, H, D]`; `fresh` is its own key and value."""
    key, value = fresh
    if chunk.context:
        stored = cache.read(layer, chunk.blocks).flatten(0, 1)[: chunk.num_keys]
        key, value = stored[:, 0], stored[:, 1]
    num_tokens, num_heads, width = query.shape
    num_kv = key.shape[1]
    groups = num_heads // num_kv
    # Key heads play the batch, so that their query heads can share them through a stride of 0.
    grouped = query.view(num_tokens, num_kv, groups, width).permute(1, 2, 0, 3)
    shared_key = key.transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)
    shared_value = value.transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)
    is_causal = chunk.context == 0 and (
        options.window is None or options.window >= chunk.num_tokens
    )
    if options.is_plain and is_causal:
        out = F.scaled_dot_product_attention(
            grouped, shared_key, shared_value, is_causal=True, scale=options.scaling
        )
    else:
        bias = chunk.bias(options.window, query.dtype)
        if options.is_plain:
            out = F.scaled_dot_product_attention(
                grouped, shared_key, shared_value, attn_mask=bias, scale=options.scaling
            )
        else:
            sinks = None if options.sinks is None else options.sinks.view(num_kv, groups, 1, 1)
            out = plain_attention(
                grouped,
                shared_key,
                shared_value,
                bias,
                scaling=options.scaling,
                softcap=options.softcap,
                sinks=sinks,
            )
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, width)
