"""LoRA inside any `torch.nn.Module`, with many adapters in one forward pass.

Knows no model family, no file format and no request.
"""

from __future__ import annotations

from lora_layers.config import LoraModelConfig
from lora_layers.content import PreparedAdapter
from lora_layers.errors import (
    AdapterMismatchError,
    AdapterNotActiveError,
    InferenceOnlyError,
    LayerConfigError,
    LayerError,
    NotLinearError,
    RoutingNotSetError,
    TargetNotFoundError,
    UnsupportedModuleError,
)
from lora_layers.inject import WrapReport
from lora_layers.manager import LoraModelManager
from lora_layers.memory import StackForm, StackMemory
from lora_layers.placement import WrittenSlot
from lora_layers.step import RowRun
from lora_layers.wrappers.parts import EmbeddingParts, LinearParts, embedding_parts, linear_parts

__all__ = [
    "AdapterMismatchError",
    "AdapterNotActiveError",
    "EmbeddingParts",
    "InferenceOnlyError",
    "LayerConfigError",
    "LayerError",
    "LinearParts",
    "LoraModelConfig",
    "LoraModelManager",
    "NotLinearError",
    "PreparedAdapter",
    "RoutingNotSetError",
    "RowRun",
    "StackForm",
    "StackMemory",
    "TargetNotFoundError",
    "UnsupportedModuleError",
    "WrapReport",
    "WrittenSlot",
    "embedding_parts",
    "linear_parts",
]
