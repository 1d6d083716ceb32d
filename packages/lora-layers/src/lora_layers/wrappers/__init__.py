"""Modules that take a base module's place and add the LoRA part to its output.

They know their own slots and the step's routing; nothing of adapters, keys or requests.
"""

from __future__ import annotations

from lora_layers.wrappers.base import LoraModule, SlotStack
from lora_layers.wrappers.embedding import LoraEmbedding
from lora_layers.wrappers.experts import ExpertStack, LoraExperts
from lora_layers.wrappers.head import ClassificationHeadWithLora
from lora_layers.wrappers.linear import LoraLinear
from lora_layers.wrappers.merged import LoraMerged
from lora_layers.wrappers.packed import PackedGroup, PackedMember

__all__ = [
    "ClassificationHeadWithLora",
    "ExpertStack",
    "LoraEmbedding",
    "LoraExperts",
    "LoraLinear",
    "LoraMerged",
    "LoraModule",
    "PackedGroup",
    "PackedMember",
    "SlotStack",
]
