"""Whole decoder layers in one native call: those of Llama's form, in bfloat16 on CPUs with AMX.

A layer is recognised by what it holds, and its fast form is kept only where it agrees with the
layer's own forward on random numbers, over keys and values of a store. What a step needs beyond
it (weighted sets of adapters, gains, weights of an adapter's own) goes through the layer's own
forward, whose parts have fast forms of their own.

Letters: `T` rows, `D` hidden width, `W` head width.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from lora_layers import LinearParts, linear_parts

from .layers import GatedMlp, RmsNorm

if TYPE_CHECKING:
    from collections.abc import Callable

    from lora_server.model.attention import PagedAttention

    from .decoder_step import StepTable

_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}


class _Packed(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_out", ctypes.c_int64),
        ("num_in", ctypes.c_int64),
    )


class _Layer(ctypes.Structure):
    """`Layer` of decoder.cpp."""

    _fields_ = (
        ("projections", _Packed * 4),
        *((name, ctypes.c_void_p) for name in ("input", "inner", "query", "key")),
        *((name, ctypes.c_int64) for name in ("heads", "key_heads", "width", "block", "window")),
        *((f"{name}_epsilon", ctypes.c_float) for name in ("input", "inner", "query", "key")),
        ("scaling", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """What a layer of Llama's form is made of."""

    projections: tuple[LinearParts, LinearParts, LinearParts, LinearParts]
    """Queries, keys and values; attention's output; gate and up; down."""
    norms: tuple[nn.Module, nn.Module, nn.Module | None, nn.Module | None]
    """Before attention, before the MLP, of queries' and of keys' heads."""
    head_width: int
    layer_idx: int


def find_parts(layer: nn.Module) -> LayerParts | None:
    """Return the parts of a layer whose children are those of Llama's, with packed projections."""
    children = dict(layer.named_children())
    if children.keys() != _CHILDREN:
        return None
    attention, mlp = cast("Any", children["self_attn"]), cast("Any", children["mlp"])
    own = {name for name, _ in attention.named_children()}
    norms = [
        children["input_layernorm"],
        children["post_attention_layernorm"],
        getattr(attention, "q_norm", None),
        getattr(attention, "k_norm", None),
    ]
    if not _PROJECTIONS <= own <= _PROJECTIONS | _HEAD_NORMS:
        return None
    # Forms that were compared with the modules' own when the model was loaded.
    is_known = isinstance(mlp.forward, GatedMlp) and all(
        norm is None or isinstance(norm.forward, RmsNorm) for norm in norms
    )
    if not is_known:
        return None
    projections = [
        linear_parts([attention.q_proj, attention.k_proj, attention.v_proj]),
        linear_parts([attention.o_proj]),
        linear_parts([mlp.gate_proj, mlp.up_proj]),
        linear_parts([mlp.down_proj]),
    ]
    if None in projections:
        return None
    return LayerParts(
        projections=cast("Any", tuple(projections)),
        norms=cast("Any", tuple(norms)),
        head_width=int(attention.head_dim),
        layer_idx=int(attention.layer_idx),
    )


class DecoderLayer:
    """The forward of one layer, `[1, T, D]` to the same shape, in one call where that is possible.

    Several layers share a `StepTable`, which is filled once a step.
    """

    def __init__(
        self,
        layer: nn.Module,
        parts: LayerParts,
        attention: PagedAttention,
        table: StepTable,
        run: Callable[..., None],
    ) -> None:
        """Keep the layer's own forward for what the kernel does not take.

        Args:
            layer: its parts must stay what and where they are.
            parts: of the layer.
            attention: the model's, with its store and the step.
            table: shared by all layers of the model.
            run: `decoder_layer` of decoder.cpp.
        """
        self._original = layer.forward
        self._parts = parts
        self._attention = attention
        self._table = table
        self._run = run
        self.hidden_width = parts.projections[0].product.in_features
        """`D`."""
        self._fields: _Layer | None = None
        self._address = 0
        self.num_calls = 0
        """Calls that ran as one kernel."""

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *arguments: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Map `[1, T, D]` bfloat16; all arguments are those of transformers' decoder layers."""
        if position_embeddings is not None and not arguments:
            out = self._run_fused(hidden_states, position_embeddings)
            if out is not None:
                return out
        result: torch.Tensor = self._original(
            hidden_states, *arguments, position_embeddings=position_embeddings, **options
        )
        return result

    def _run_fused(
        self, hidden_states: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor | None:
        """Return None for what the kernel does not take."""
        cache, step = self._attention.cache, self._attention.step
        num_rows = hidden_states.shape[1]
        if cache is None or step is None or hidden_states.shape != (1, num_rows, self.hidden_width):
            return None
        first, second, third, fourth = self._parts.projections
        found = (
            first.adapter_addresses(num_rows),
            second.adapter_addresses(num_rows),
            third.adapter_addresses(num_rows),
            fourth.adapter_addresses(num_rows),
        )
        if None in found:
            return None
        pairs = cast("tuple[tuple[int, int], ...]", found)
        routing = max(address for _, address in pairs)  # the same one, or 0
        width = self._parts.head_width
        address = self._table.address(step, num_rows, angles, width=width, routing=routing)
        if address is None:
            return None
        if self._fields is None:
            self._fill(cache.block_size)
        states = hidden_states.contiguous()
        out = torch.empty_like(states)
        store = cache.layers[self._parts.layer_idx]
        self._run(
            self._address,
            address,
            *(module or None for module, _ in pairs),
            states.data_ptr(),
            out.data_ptr(),
            store.data_ptr(),
        )
        self.num_calls += 1
        return out

    def _fill(self, block_size: int) -> None:
        parts = self._parts
        options = self._attention.options[parts.layer_idx]
        shape = self._attention.seen[parts.layer_idx]
        fields = _Layer(
            projections=(_Packed * 4)(*(_packed_of(part) for part in parts.projections)),
            heads=parts.projections[1].product.in_features // parts.head_width,
            key_heads=shape.num_kv_heads,
            width=parts.head_width,
            block=block_size,
            window=options.window or 0,
            scaling=options.scaling,
        )
        for name, norm in zip(("input", "inner", "query", "key"), parts.norms, strict=True):
            if norm is not None:
                setattr(fields, name, cast("torch.Tensor", norm.weight).data_ptr())
                setattr(fields, f"{name}_epsilon", norm.variance_epsilon)
        self._fields, self._address = fields, ctypes.addressof(fields)

    def forget(self) -> None:
        """Read block size, options and addresses anew at the next call."""
        self._fields = None


def can_fuse(parts: LayerParts, attention: PagedAttention, dtype: torch.dtype) -> bool:
    """Whether the kernel does what a layer of these parts needs; not yet, whether it agrees."""
    shape, options = attention.seen.get(parts.layer_idx), attention.options.get(parts.layer_idx)
    if shape is None or options is None:
        return False
    width, qkv, inner = parts.head_width, parts.projections[0], parts.projections[2]
    num_heads = parts.projections[1].product.in_features // width
    weights = [norm.weight for norm in parts.norms if norm is not None]
    return (
        dtype is torch.bfloat16
        and options.is_plain
        and shape.head_dim == shape.value_head_dim == width
        and width % 32 == 0
        and qkv.product.out_features == (num_heads + 2 * shape.num_kv_heads) * width
        and inner.product.out_features == 2 * parts.projections[3].product.in_features
        and all(cast("torch.Tensor", weight).dtype is dtype for weight in weights)
    )


def _packed_of(part: LinearParts) -> _Packed:
    weight, bias = part.product.addresses
    product = part.product
    return _Packed(weight, bias or None, product.out_features, product.in_features)
