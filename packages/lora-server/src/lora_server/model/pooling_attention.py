"""Attention over a packed step of whole sequences, without a cache and without padding.

A step is one `[1, T]` call whose rows belong to many sequences, each of them complete. Sequences of
equal length attend together; no row is computed for padding. `B` sequences of a group, `S` their
length, `H` heads, `D` head width.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention
from transformers import AttentionInterface

from .attention_math import plain_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

_names = itertools.count()

_BiasKey = tuple[int | None, bool, torch.dtype]


@dataclass(kw_only=True)
class LengthGroup:
    """Sequences of one length."""

    length: int
    """`S`."""
    rows: torch.Tensor | slice
    """Their rows, `[B * S]`, a sequence's rows side by side; a slice where all are neighbours."""
    _biases: dict[_BiasKey, torch.Tensor] = field(default_factory=dict)

    def bias(
        self, window: int | None, *, is_causal: bool, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Additive mask `[S, S]`; the same tensor for every layer that asks for it."""
        key = (window, is_causal, dtype)
        found = self._biases.get(key)
        if found is None:
            found = _bias(self.length, window, is_causal=is_causal, dtype=dtype, device=device)
            self._biases[key] = found
        return found


@dataclass(frozen=True, kw_only=True)
class PackedStep:
    """Which rows of a step belong together."""

    groups: tuple[LengthGroup, ...]
    """One a length; every row of the step is in one."""


class PackedAttention:
    """The attention function of one pooling model, and the state its calls share.

    `name` is what the model's `_attn_implementation` must be. Set `step` before each forward.
    Whether a query sees what follows is the layer's own `is_causal`, as in transformers.
    """

    def __init__(self) -> None:
        self.name = f"lora_server_packed_{next(_names)}"
        self.step: PackedStep | None = None
        self.num_calls = 0
        """Layers that attended since the start."""
        self.is_causal = False
        """Whether the layer called last was causal."""
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
        """Attend within each sequence.

        Args:
            module: the attention layer.
            query: `[1, H, T, D]`.
            key: `[1, kv heads, T, D]`.
            value: `[1, kv heads, T, D]`.
            attention_mask: always None.
            scaling: factor on the logits, default `D ** -0.5`.
            sliding_window: a query sees keys less than so many positions away.
            softcap: `softcap * tanh(logits / softcap)` when given.
            s_aux: `[H]` attention sinks.

        Returns:
            `[1, T, H, D]` and None for the weights.
        """
        assert self.step is not None, "the step is set before each forward"
        self.num_calls += 1
        self.is_causal = bool(getattr(module, "is_causal", True))
        options = _Options(
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
            is_causal=self.is_causal,
        )
        rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # each [T, H, D]
        groups = self.step.groups
        if len(groups) == 1 and isinstance(groups[0].rows, slice):
            return _attend(rows, groups[0], options).unsqueeze(0), None
        out = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
        for group in groups:
            out[group.rows] = _attend([tensor[group.rows] for tensor in rows], group, options)
        return out.unsqueeze(0), None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The per-layer arguments, under one name."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    is_causal: bool

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


def _attend(rows: Sequence[torch.Tensor], group: LengthGroup, options: _Options) -> torch.Tensor:
    """Attend within the sequences of a group: three times `[B * S, H, D]` -> `[B * S, H, D]`."""
    query, key, value = (
        tensor.reshape(-1, group.length, *tensor.shape[1:]).transpose(1, 2) for tensor in rows
    )  # [B, H, S, D]
    if key.shape[1] < query.shape[1]:
        key, value = (
            tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)
            for tensor in (key, value)
        )
    is_windowed = options.window is not None and options.window < group.length
    bias = None
    if is_windowed or (options.is_causal and not options.is_plain):
        bias = group.bias(
            options.window, is_causal=options.is_causal, dtype=query.dtype, device=query.device
        )
    if options.is_plain:
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=bias,
            is_causal=options.is_causal and bias is None,
            scale=options.scaling,
        )
    else:
        sinks = None if options.sinks is None else options.sinks.view(-1, 1, 1)
        out = plain_attention(
            query, key, value, bias, scaling=options.scaling, softcap=options.softcap, sinks=sinks
        )
    return out.transpose(1, 2).reshape(-1, *rows[0].shape[1:])


def _bias(
    length: int,
    window: int | None,
    *,
    is_causal: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return 0 where a query sees a key, minus infinity elsewhere: `[S, S]`."""
    position = torch.arange(length, device=device)
    distance = position.unsqueeze(1) - position  # query minus key
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if is_causal:
        hidden |= distance < 0
    if window is not None:
        hidden |= distance.abs() >= window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
