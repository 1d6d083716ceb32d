"""LayerParts: what a decoder layer of Llama's form is made of, and whether a layer has that form.

Letters: `D` hidden width, `W` head width.
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
    from lora_server.model.attention import PagedAttention

_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_WIDTH_MULTIPLE = 32


class PackedFields(ctypes.Structure):
    """`product::Packed`."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_out", ctypes.c_int64),
        ("num_in", ctypes.c_int64),
    )


def packed_fields(part: LinearParts) -> PackedFields:
    """Return a projection's base product as the kernel reads it."""
    product = part.product
    weight, bias = product.addresses
    return PackedFields(weight, bias or None, product.out_features, product.in_features)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """What a layer of Llama's form is made of."""

    projections: tuple[LinearParts, LinearParts, LinearParts, LinearParts]
    """Queries, keys and values; attention's output; gate and up; down."""
    norms: tuple[nn.Module, nn.Module, nn.Module | None, nn.Module | None]
    """Before attention, before the MLP, of queries' and of keys' heads."""
    head_width: int
    """`W`."""
    layer_idx: int
    """Its place among the attention layers of the model."""


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


def can_fuse(parts: LayerParts, attention: PagedAttention, dtype: torch.dtype) -> bool:
    """Whether the kernel does what a layer of these parts needs; not yet, whether it agrees."""
    shape, options = attention.seen.get(parts.layer_idx), attention.options.get(parts.layer_idx)
    if shape is None or options is None:
        return False
    width, (qkv, output, gate_up, down) = parts.head_width, parts.projections
    num_heads = output.product.in_features // width
    weights = [norm.weight for norm in parts.norms if norm is not None]
    return (
        dtype is torch.bfloat16
        and options.is_plain
        and shape.head_dim == shape.value_head_dim == width
        and width % _WIDTH_MULTIPLE == 0
        and qkv.product.out_features == (num_heads + 2 * shape.num_kv_heads) * width
        and gate_up.product.out_features == 2 * down.product.in_features
        and all(cast("torch.Tensor", weight).dtype is dtype for weight in weights)
    )
