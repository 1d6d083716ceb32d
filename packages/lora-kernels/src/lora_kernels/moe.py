"""align_experts and moe_lora_: LoRA over the experts of a mixture; formula, checks, dispatch.

For inference: no gradient flows through the operators.

Letters: `T` tokens, `K` experts per token, `X` experts, `N` slots, `I` in, `O` out, `P` slices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_kernels import dispatch, library, library_experts
from lora_kernels.backend import Backend
from lora_kernels.checks import check_backend
from lora_kernels.expert_checks import check_expert_ids, check_experts, check_tensors
from lora_kernels.expert_routing import ExpertRouting, sort_pairs

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.expert_weights import ExpertWeights
    from lora_kernels.routing import Routing


def align_experts(
    routing: Routing, expert_ids: Tensor, *, num_experts: int, expert_offset: int = 0
) -> ExpertRouting:
    """Sort the chosen experts of a step's adapter tokens by slot and expert.

    Tokens without entry have no pairs. An id outside `expert_offset..expert_offset + X - 1` has
    none either: its expert lives in another process (expert parallel), or the router marked the
    choice as empty. Nothing here waits for a device.

    Args:
        routing: the step's entries.
        expert_ids: the router's choice, `[T, K]` int64 or int32, global numbers.
        num_experts: `X`, experts held here.
        expert_offset: global number of the first of them.

    Raises:
        UnsupportedShapeError: `expert_ids` is not `[T, K]`.
        KernelArgumentError: the ids are not integers or on another device, or a number of experts
            or an offset is impossible.
    """
    if torch.compiler.is_compiling():
        pairs = torch.ops.lora_kernels.align_experts(
            expert_ids, *library.routing_arguments(routing), num_experts, expert_offset
        )
        return ExpertRouting(
            pair_idx=pairs[0],
            pair_keys=pairs[1],
            pair_rows=pairs[2],
            scales=pairs[3],
            local_ids=pairs[4],
            routing=routing,
            num_experts=num_experts,
            num_choices=expert_ids.shape[1],
        )
    check_expert_ids(routing, expert_ids, num_experts, expert_offset)
    return sort_pairs(routing, expert_ids, num_experts=num_experts, expert_offset=expert_offset)


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
    if torch.compiler.is_compiling():
        layer = library_experts.layer_arguments(weights, expert_routing, backend)
        torch.ops.lora_kernels.moe_lora_(y, x, router_weights, *layer)
        return y
    check_experts(expert_routing, weights)
    check_backend("moe_lora_", expert_routing.routing, backend)
    check_tensors(y, x, router_weights, weights, expert_routing)
    if expert_routing.routing.is_empty:
        return y
    return dispatch.moe_lora_(y, x, weights, expert_routing, router_weights, backend=backend)
