"""Punica operators: the LoRA part of a step whose tokens use different adapters.

Knows nothing of adapters, files, requests or models: tensors, slots and tokens only.
"""

from __future__ import annotations

from lora_kernels.backend import Backend
from lora_kernels.buffers import RoutingBuffers
from lora_kernels.build import build_routing, route_tokens
from lora_kernels.embedding import embedding_lora_
from lora_kernels.errors import (
    BackendUnavailableError,
    KernelArgumentError,
    KernelError,
    UnsupportedShapeError,
)
from lora_kernels.expert_routing import ExpertRouting
from lora_kernels.expert_weights import ExpertWeights
from lora_kernels.moe import align_experts, moe_lora_
from lora_kernels.ops import apply_lora_, expand_, shrink
from lora_kernels.routing import Routing, Segment
from lora_kernels.runs import route_runs
from lora_kernels.weights import StackedWeights

__all__ = [
    "Backend",
    "BackendUnavailableError",
    "ExpertRouting",
    "ExpertWeights",
    "KernelArgumentError",
    "KernelError",
    "Routing",
    "RoutingBuffers",
    "Segment",
    "StackedWeights",
    "UnsupportedShapeError",
    "align_experts",
    "apply_lora_",
    "build_routing",
    "embedding_lora_",
    "expand_",
    "moe_lora_",
    "route_runs",
    "route_tokens",
    "shrink",
]
