"""Reads, checks, packs and converts LoRA adapters. Knows nothing of models, kernels or serving."""

from __future__ import annotations

from lora_weights.adapter import Adapter, BaseCopy
from lora_weights.bound import BaseTensors, BoundPart
from lora_weights.config import AdapterConfig
from lora_weights.errors import (
    AdapterError,
    AdapterNotFoundError,
    InvalidAdapterError,
    Problem,
    ProblemCode,
    SourceError,
    UnsafeFormatError,
)
from lora_weights.experts import (
    ExpertPair,
    ExpertPart,
    ExpertShape,
    expand_outer,
    expert_range,
    has_shared_outer,
    join_w13,
    shard_experts,
    shard_w13,
    share_outer,
    slice_experts,
    split_w13,
    to_parameters,
    to_per_expert,
)
from lora_weights.kinds import PartKind
from lora_weights.load import load_adapter
from lora_weights.modules import (
    FullModule,
    LoraPair,
    ModuleKind,
    ModulePart,
    ModuleShape,
    TokenRows,
)
from lora_weights.norms import product_norm
from lora_weights.packing import PackedPart, pack_parts, unpack_parts
from lora_weights.report import AdapterReport, inspect_adapter
from lora_weights.save import RawAdapter, save_adapter
from lora_weights.sharding import ShardKind, ShardLayout, TensorParallel, shard_packed
from lora_weights.summary import ModuleSummary
from lora_weights.validate import bind_adapter

__all__ = [
    "Adapter",
    "AdapterConfig",
    "AdapterError",
    "AdapterNotFoundError",
    "AdapterReport",
    "BaseCopy",
    "BaseTensors",
    "BoundPart",
    "ExpertPair",
    "ExpertPart",
    "ExpertShape",
    "FullModule",
    "InvalidAdapterError",
    "LoraPair",
    "ModuleKind",
    "ModulePart",
    "ModuleShape",
    "ModuleSummary",
    "PackedPart",
    "PartKind",
    "Problem",
    "ProblemCode",
    "RawAdapter",
    "ShardKind",
    "ShardLayout",
    "SourceError",
    "TensorParallel",
    "TokenRows",
    "UnsafeFormatError",
    "bind_adapter",
    "expand_outer",
    "expert_range",
    "has_shared_outer",
    "inspect_adapter",
    "join_w13",
    "load_adapter",
    "pack_parts",
    "product_norm",
    "save_adapter",
    "shard_experts",
    "shard_packed",
    "shard_w13",
    "share_outer",
    "slice_experts",
    "split_w13",
    "to_parameters",
    "to_per_expert",
    "unpack_parts",
]
