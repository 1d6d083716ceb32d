"""From an operator, checked arguments and a backend to the function that does it.

Knows which backend finishes gains and biases itself (the kernels, the reference) and which leaves
them to a step of their own (aten). Operators check; the functions here do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_kernels._aten import embedding as aten_embedding
from lora_kernels._aten import invariant, linear
from lora_kernels._aten import moe as aten_moe
from lora_kernels._aten.affine import apply_affine_
from lora_kernels._native import linear as native
from lora_kernels.backend import Backend
from lora_kernels.reference import embedding as reference_embedding
from lora_kernels.reference import linear as reference
from lora_kernels.reference import moe as reference_moe

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.expert_routing import ExpertRouting
    from lora_kernels.expert_weights import ExpertWeights
    from lora_kernels.routing import Routing
    from lora_kernels.weights import StackedWeights

_ATEN = (Backend.ATEN, Backend.NATIVE)
"""Backends that do with torch's operators what has no kernel of their own."""


@torch.no_grad()
def shrink(
    x: Tensor,
    weights: StackedWeights,
    routing: Routing,
    *,
    backend: Backend,
    batch_invariant: bool,
) -> Tensor:
    """Run `shrink` for a routing with entries."""
    if backend in _ATEN:
        if batch_invariant:
            return invariant.shrink(x, weights, routing)
        return linear.shrink(x, weights, routing)
    if backend is Backend.REFERENCE:
        return reference.shrink(x, weights, routing)
    from lora_kernels._triton import linear as triton_linear

    return triton_linear.shrink(x, weights, routing, batch_invariant=batch_invariant)


@torch.no_grad()
def expand_(
    y: Tensor,
    v: Tensor,
    weights: StackedWeights,
    routing: Routing,
    *,
    backend: Backend,
    batch_invariant: bool,
) -> Tensor:
    """Run `expand_` for a routing with entries."""
    if backend in _ATEN:
        aten = invariant if batch_invariant else linear
        aten.expand_(y, v, weights, routing)
        return apply_affine_(y, weights, routing, batch_invariant=batch_invariant)
    if backend is Backend.REFERENCE:
        return reference.expand_(y, v, weights, routing)
    from lora_kernels._triton import linear as triton_linear

    return triton_linear.expand_(y, v, weights, routing, batch_invariant=batch_invariant)


@torch.no_grad()
def apply_lora_(
    y: Tensor,
    x: Tensor,
    weights: StackedWeights,
    routing: Routing,
    *,
    backend: Backend,
    batch_invariant: bool,
) -> Tensor:
    """Run `apply_lora_` for a routing with entries."""
    is_native = backend is Backend.NATIVE and not batch_invariant
    if is_native and native.can_apply(y, x, weights, routing):
        native.apply_lora_(y, x, weights, routing)
        return apply_affine_(y, weights, routing, batch_invariant=batch_invariant)
    if backend in _ATEN:
        aten = invariant if batch_invariant else linear
        aten.apply_lora_(y, x, weights, routing)
        return apply_affine_(y, weights, routing, batch_invariant=batch_invariant)
    if backend is Backend.REFERENCE:
        return reference.apply_lora_(y, x, weights, routing)
    from lora_kernels._triton import linear as triton_linear

    return triton_linear.apply_lora_(y, x, weights, routing, batch_invariant=batch_invariant)


@torch.no_grad()
def embedding_lora_(
    y: Tensor,
    token_ids: Tensor,
    weights: StackedWeights,
    routing: Routing,
    *,
    backend: Backend,
    batch_invariant: bool,
) -> Tensor:
    """Run `embedding_lora_` for a routing with entries."""
    if backend in _ATEN:
        aten = invariant if batch_invariant else aten_embedding
        aten.embedding_lora_(y, token_ids, weights, routing)
        return apply_affine_(y, weights, routing, batch_invariant=batch_invariant)
    if backend is Backend.REFERENCE:
        return reference_embedding.embedding_lora_(y, token_ids, weights, routing)
    from lora_kernels._triton import embedding as triton_embedding

    return triton_embedding.embedding_lora_(
        y, token_ids, weights, routing, batch_invariant=batch_invariant
    )


@torch.no_grad()
def moe_lora_(
    y: Tensor,
    x: Tensor,
    weights: ExpertWeights,
    expert_routing: ExpertRouting,
    router_weights: Tensor | None,
    *,
    backend: Backend,
) -> Tensor:
    """Run `moe_lora_` for a routing with entries."""
    if backend in _ATEN:
        return aten_moe.moe_lora_(y, x, weights, expert_routing, router_weights)
    if backend is Backend.REFERENCE:
        return reference_moe.moe_lora_(y, x, weights, expert_routing, router_weights)
    from lora_kernels._triton import moe as triton_moe

    return triton_moe.moe_lora_(y, x, weights, expert_routing, router_weights)
