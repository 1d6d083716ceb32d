"""moe_lora_: formula, checks, and the choice of the backend.

For inference: no gradient flows through the operator.

Letters: `T` tokens, `K` experts per token, `X` experts, `N` slots, `I` in, `O` out, `P` slices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_kernels._aten import moe as aten
from lora_kernels.backend import Backend
from lora_kernels.checks import FLOATS, check_backend
from lora_kernels.errors import KernelArgumentError, UnsupportedShapeError
from lora_kernels.reference import moe as reference

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.expert_routing import ExpertRouting
    from lora_kernels.expert_weights import ExpertWeights

_OP = "moe_lora_"


def moe_lora_(
    y: Tensor,
    x: Tensor,
    weights: ExpertWeights,
    expert_routing: ExpertRouting,
    *,
    router_weights: Tensor | None = None,
    backend: Backend = Backend.ATEN,
) -> Tensor:
    """Add the LoRA part of one stage of an expert layer, in place.

    Semantics: `y[t * K + k, slice p] += scale[e] * router_weights[t, k] * B_p @ (A_p @ x_tk)` for
    each entry `e` of token `t` and each `k` whose expert `i = expert_ids[t, k]` is held here, with
    `A_p = lora_a[p][slot[e], i, :r]`, `B_p = lora_b[p][slot[e], i, :, :r]` and `r` the true rank
    of the slot's slice `p`. A factor shared by all experts is taken at 0 instead of `i`.

    An expert layer calls it twice: with w13 before the activation, without router weights, so
    that `y` and the base's product go through the activation together; with w2 before the sum
    over the `K` choices, with the router weights if the rows of `y` carry them already. Products
    and the sum over the entries of a token are in float32. Rows without a pair - of a base token,
    of a remote or invalid expert, of a slot without expert weights - keep their bits.

    Args:
        y: the base experts' output, `[T * K, sum O_p]`, written in place; rows may be strided.
        x: activations of the tokens, `[T, I]`, or of the rows, `[T * K, I]`; any strides.
        weights: the stage's slots.
        expert_routing: this layer's pairs, from `align_experts`.
        router_weights: `[T, K]`, any float; 1 everywhere when left out.
        backend: the implementation.

    Returns:
        `y`.

    Raises:
        UnsupportedShapeError: `y`, `x` or `router_weights` has another shape.
        KernelArgumentError: slots, experts, dtypes or devices do not fit together.
        BackendUnavailableError: the backend cannot run where the tensors are.
    """
    _check_pairing(expert_routing, weights)
    check_backend(_OP, expert_routing.routing, backend)
    _check_tensors(y, x, router_weights, weights, expert_routing)
    if expert_routing.routing.is_empty:
        return y
    with torch.no_grad():
        if backend is Backend.REFERENCE:
            return reference.moe_lora_(y, x, weights, expert_routing, router_weights)
        if backend is Backend.ATEN:
            return aten.moe_lora_(y, x, weights, expert_routing, router_weights)
        from lora_kernels._triton import moe as triton_moe

        return triton_moe.moe_lora_(y, x, weights, expert_routing, router_weights)


def _check_pairing(expert_routing: ExpertRouting, weights: ExpertWeights) -> None:
    found = (expert_routing.num_slots, expert_routing.num_experts)
    expected = (weights.num_slots, weights.num_experts)
    if found != expected:
        raise KernelArgumentError(
            f"{_OP}: expert routing is for {found[0]} slots and {found[1]} experts, weights have "
            f"{expected[0]} and {expected[1]}"
        )
    if expert_routing.device != weights.device:
        raise KernelArgumentError(
            f"{_OP}: expert routing is on {expert_routing.device}, weights are on {weights.device}"
        )


def _check_tensors(
    y: Tensor,
    x: Tensor,
    router_weights: Tensor | None,
    weights: ExpertWeights,
    expert_routing: ExpertRouting,
) -> None:
    num_tokens, num_choices = expert_routing.local_ids.shape
    num_rows, width = num_tokens * num_choices, weights.in_features
    _check_rows("y", y, [[num_rows, weights.total_out_features]], weights)
    _check_rows("x", x, [[num_tokens, width], [num_rows, width]], weights)
    if router_weights is not None:
        _check_rows("router_weights", router_weights, [[num_tokens, num_choices]], weights)


def _check_rows(name: str, tensor: Tensor, shapes: list[list[int]], weights: ExpertWeights) -> None:
    if list(tensor.shape) not in shapes:
        expected = " or ".join(str(shape) for shape in shapes)
        raise UnsupportedShapeError(f"{_OP}: {name} is {list(tensor.shape)}, expected {expected}")
    if tensor.dtype not in FLOATS:
        raise KernelArgumentError(
            f"{_OP}: {name} is {tensor.dtype}, expected float32, float16 or bfloat16"
        )
    if tensor.device != weights.device:
        raise KernelArgumentError(
            f"{_OP}: {name} is on {tensor.device}, weights on {weights.device}"
        )
