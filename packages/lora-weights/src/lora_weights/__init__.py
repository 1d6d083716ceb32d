"""Reads, checks, packs and converts LoRA adapters. Knows nothing of models, kernels or serving."""

from __future__ import annotations

from lora_weights.adapter import Adapter
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
from lora_weights.experts import ExpertPair, ExpertPart, ExpertShape
from lora_weights.load import load_adapter
from lora_weights.modules import (
    FullModule,
    LoraPair,
    ModuleKind,
    ModulePart,
    ModuleShape,
    TokenRows,
)
from lora_weights.packing import PackedPart, pack_parts, unpack_parts
from lora_weights.report import AdapterReport, ModuleSummary, inspect_adapter
from lora_weights.save import RawAdapter, save_adapter
from lora_weights.validate import bind_adapter

__all__ = [
    "Adapter",
    "AdapterConfig",
    "AdapterError",
    "AdapterNotFoundError",
    "AdapterReport",
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
    "Problem",
    "ProblemCode",
    "RawAdapter",
    "SourceError",
    "TokenRows",
    "UnsafeFormatError",
    "bind_adapter",
    "inspect_adapter",
    "load_adapter",
    "pack_parts",
    "save_adapter",
    "unpack_parts",
]
