"""What the base product of a linear module is, and a faster form of it for bfloat16 on CPUs.

oneDNN brings a plain bfloat16 weight into its own blocked layout on every call. A weight that was
brought there once saves that. Measured with torch 2.15 on two cores of a Xeon with AMX, p10 in
microseconds, plain -> prepacked:

    I x O          16 rows       128 rows      512 rows
    576 x 960      114 ->  63    168 -> 116    372 -> 364
    576 x 3072     335 -> 206    539 -> 394    (equal)
    1536 x 576     139 ->  78    243 -> 182    513 -> 741
    576 x 576       64 ->  50    105 ->  80    218 -> 313

float32 gains nothing at few rows, so it is left alone.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from lora_kernels import BackendUnavailableError, UnsupportedShapeError
from lora_kernels.native import PackedProduct

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_PREPACKED_ROWS = 256
"""Above this many rows the plain product is as fast or faster (table above)."""

TYPICAL_ROWS = 16
"""Rows oneDNN is told of when it chooses a layout; 16, 128 and 512 led to the same times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """Widths of a linear module, and how its weight is stored."""

    in_features: int
    """`I`."""
    out_features: int
    """`O`."""
    is_transposed: bool
    """The weight is `[I, O]` (Conv1D), not `[O, I]`."""


def read_linear_shape(module: nn.Module) -> LinearShape | None:
    """Return the widths of a linear module; None for any other."""
    if isinstance(module, nn.Linear):
        return LinearShape(
            in_features=module.in_features, out_features=module.out_features, is_transposed=False
        )
    if is_conv1d_like(module):
        in_features, out_features = cast("Tensor", module.weight).shape
        return LinearShape(in_features=in_features, out_features=out_features, is_transposed=True)
    return None


def is_conv1d_like(module: nn.Module) -> bool:
    """Whether this is a linear module in GPT-2's form: weight `[I, O]`, widths `nx` and `nf`."""
    weight = getattr(module, "weight", None)
    widths = getattr(module, "nx", None), getattr(module, "nf", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and tuple(weight.shape) == widths  # noqa: PLR2004


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the module is exactly `F.linear(x, weight, bias)`: no subclass, no hooks."""
    hooks = module._forward_hooks or module._forward_pre_hooks  # noqa: SLF001
    return type(module) is nn.Linear and not hooks


def takes_one_input(module: nn.Module) -> bool:
    """Whether the module's forward has one parameter, so that a wrapper sees all it depends on."""
    return len(inspect.signature(module.forward).parameters) == 1


def make_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return `x -> F.linear(x, weight, bias)`."""

    def product(x: Tensor) -> Tensor:
        return functional.linear(x, weight, bias)

    return product


def prepack_product(
    weight: Tensor, bias: Tensor | None, *, native: bool = False
) -> Callable[[Tensor], Tensor] | None:
    """Return the same product over a copy of the weight in oneDNN's, or the kernels', layout.

    Args:
        weight: `[O, I]`. It is read once more on each call of many rows, so it must stay.
        bias: `[O]` or None.
        native: use `lora_kernels.native.PackedProduct` where it exists and takes the weight: over
            all linear modules of SmolLM2-135M 9.0 ms instead of 13.4 at 16 rows, 20 instead of 26
            at 128, 63 instead of 67 to 74 at 512, on the machine above.

    Returns:
        None where it does not pay or does not exist: other dtypes than bfloat16, other devices than
        the CPU, a torch build without oneDNN or a CPU without bfloat16 products.
    """
    if not can_prepack(weight):
        return None
    if weight.is_meta:
        return make_product(weight, bias)  # never called: only the choice is of use
    if native:
        try:
            return PackedProduct(weight, bias)
        except (UnsupportedShapeError, BackendUnavailableError):
            pass  # widths that are no multiples of a tile, or a processor without tiles
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), TYPICAL_ROWS)  # noqa: SLF001
    multiply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
    in_features = weight.shape[1]

    def product(x: Tensor) -> Tensor:
        if x.numel() > MAX_PREPACKED_ROWS * in_features:
            return functional.linear(x, weight, bias)
        y: Tensor = multiply(x, packed, bias, "none", [], "")
        return y

    return product


def can_prepack(weight: Tensor) -> bool:
    """Whether `prepack_product` has anything to offer for this weight; of `meta`: on a CPU."""
    return (
        weight.dtype is torch.bfloat16
        and weight.device.type in {"cpu", "meta"}
        and torch._C._has_mkldnn  # noqa: SLF001
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001
    )
