"""Argument checks of the expert operators, before anything is written.

Letters: `T` tokens, `K` experts per token, `X` experts, `N` slots, `I` in, `O` out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_kernels.checks import FLOATS
from lora_kernels.errors import KernelArgumentError, UnsupportedShapeError

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.expert_routing import ExpertRouting
    from lora_kernels.expert_weights import ExpertWeights
    from lora_kernels.routing import Routing

_OP = "moe_lora_"


def check_expert_ids(
    routing: Routing, expert_ids: Tensor, num_experts: int, expert_offset: int
) -> None:
    """Check the router's choice: `[T, K]` integers on the device of the routing.

    Raises:
        UnsupportedShapeError: the shape differs.
        KernelArgumentError: dtype or device do not fit, or a number is impossible.
    """
    if expert_ids.ndim != 2 or expert_ids.shape[0] != routing.num_tokens:  # noqa: PLR2004 - [T, K]
        raise UnsupportedShapeError(
            f"align_experts: expert_ids is {list(expert_ids.shape)}, "
            f"expected [{routing.num_tokens}, K]"
        )
    if expert_ids.dtype not in (torch.int64, torch.int32):
        raise KernelArgumentError(
            f"align_experts: expert_ids is {expert_ids.dtype}, expected int64 or int32"
        )
    if expert_ids.shape[1] < 1 or num_experts < 1 or expert_offset < 0:
        raise KernelArgumentError(
            f"align_experts: K={expert_ids.shape[1]}, num_experts={num_experts}, "
            f"expert_offset={expert_offset}, expected at least one expert from 0 on"
        )
    if expert_ids.device != routing.device:
        raise KernelArgumentError(
            f"align_experts: expert_ids is on {expert_ids.device}, routing on {routing.device}"
        )


def check_experts(expert_routing: ExpertRouting, weights: ExpertWeights) -> None:
    """Check that expert routing and weights are made for each other.

    Raises:
        KernelArgumentError: slots, experts or devices differ.
    """
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


def check_tensors(
    y: Tensor,
    x: Tensor,
    router_weights: Tensor | None,
    weights: ExpertWeights,
    expert_routing: ExpertRouting,
) -> None:
    """Check `y`, `x` and `router_weights` of `moe_lora_`.

    Raises:
        UnsupportedShapeError: a shape differs.
        KernelArgumentError: a dtype or a device does not fit.
    """
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
