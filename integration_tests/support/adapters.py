"""Sixteen PEFT adapters for a tiny model: random, of unequal ranks, on different modules.

Made and saved by PEFT alone, so that the files are what PEFT's users have.
"""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Embedding, LoraLayer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import nn

    from support.checkpoints import Family

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""PEFT's files."""

STRENGTH = 1.0
"""Size of what an adapter adds to a module's output, relative to the output itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What one adapter looks like; modules are named by their part in any family."""

    rank: int
    alpha: int = 16
    targets: tuple[str, ...] = ("attention", "feed_forward")
    """Parts: attention, feed_forward, embedding, head; or `attention.1` for the second module."""
    use_rslora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Ranks of single modules, by part."""
    alphas: Mapping[str, int] = field(default_factory=dict)
    save_embeddings: bool | str = "auto"
    """PEFT's `save_embedding_layers`: whether the base's own table is put into the file too."""


RECIPES: tuple[Recipe, ...] = (
    Recipe(rank=1, targets=("attention",)),
    Recipe(rank=2),
    Recipe(rank=3, targets=("attention.0",)),
    Recipe(rank=4, use_rslora=True),
    Recipe(rank=5, alpha=10, targets=("feed_forward",)),
    Recipe(rank=8, targets=("attention", "feed_forward", "head")),
    Recipe(rank=8, targets=("attention", "embedding")),
    Recipe(
        rank=8,
        ranks={"attention.0": 3, "feed_forward.-1": 12},
        alphas={"attention.0": 4, "attention.-1": 40},
    ),
    Recipe(rank=12, alpha=12),
    Recipe(rank=16, use_rslora=True),
    Recipe(rank=16, targets=("attention.-1", "feed_forward.0")),
    Recipe(
        rank=16,
        targets=("attention", "feed_forward", "embedding", "head"),
        save_embeddings=False,
    ),
    Recipe(rank=24, targets=("attention",), use_rslora=True, ranks={"attention.-1": 1}),
    Recipe(rank=32, alpha=64),
    Recipe(rank=32, targets=("head",), save_embeddings=False),
    Recipe(rank=7, alpha=1, targets=("attention.1", "feed_forward.1")),
)


def modules_of(family: Family, part: str) -> tuple[str, ...]:
    """Translate a part's name to the family's module names."""
    fixed = {"embedding": (family.embedding,), "head": ("lm_head",)}
    if part in fixed:
        return fixed[part]
    kind, _, position = part.partition(".")
    modules: tuple[str, ...] = getattr(family, kind)
    return (modules[int(position)],) if position else modules


def lora_config(family: Family, recipe: Recipe) -> LoraConfig:
    """Write a recipe down as PEFT does."""

    def pattern(values: Mapping[str, int]) -> dict[str, Any]:
        return {name: n for part, n in values.items() for name in modules_of(family, part)}

    return LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=[n for part in recipe.targets for n in modules_of(family, part)],
        use_rslora=recipe.use_rslora,
        rank_pattern=pattern(recipe.ranks),
        alpha_pattern=pattern(recipe.alphas),
        fan_in_fan_out=family.name == "gpt2",
        task_type="CAUSAL_LM",
    )


def save_adapter(
    base: nn.Module, family: Family, recipe: Recipe, folder: Path, *, seed: int
) -> None:
    """Let PEFT make the adapter on a copy of the base, fill it with numbers, and save it."""
    with warnings.catch_warnings():
        # PEFT comments on tied heads, saved tables and Conv1D, all of which are meant here.
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(base), lora_config(family, recipe))
        generator = torch.Generator().manual_seed(seed)
        for module in model.modules():
            if isinstance(module, LoraLayer):
                _fill_(module, generator)
        model.save_pretrained(str(folder), save_embedding_layers=recipe.save_embeddings)


def _fill_(layer: LoraLayer, generator: torch.Generator) -> None:
    """Draw both factors so that the layer adds about `STRENGTH` of its own output."""
    name = "default"
    base_layer: Any = layer.get_base_layer()
    base_std = float(base_layer.weight.std())
    strength = STRENGTH * base_std / (layer.scaling[name] * math.sqrt(layer.r[name]))
    a, b = _factors(layer, name)
    # What enters an embedding is one row of A; what enters a linear layer is a sum over its width.
    width = 1 if isinstance(layer, Embedding) else a.shape[1]
    with torch.no_grad():
        a.copy_(torch.randn(a.shape, generator=generator) / math.sqrt(width))
        b.copy_(torch.randn(b.shape, generator=generator) * strength * math.sqrt(width))


def _factors(layer: LoraLayer, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(layer, Embedding):
        return layer.lora_embedding_A[name], layer.lora_embedding_B[name]
    a: Any = layer.lora_A[name]
    b: Any = layer.lora_B[name]
    return a.weight, b.weight
