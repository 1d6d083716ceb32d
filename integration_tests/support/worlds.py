"""A tiny model, its adapters and its oracle, together on the disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM

from support.adapters import RECIPES, save_adapter
from support.checkpoints import FAMILIES, save_checkpoint
from support.oracle import PeftOracle

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything about one family."""

    family: str
    folder: Path
    """Holds everything below."""
    base: Path
    """Folder of the checkpoint."""
    adapters: Mapping[str, Path]
    """Folder of each adapter, by name."""
    oracle: PeftOracle

    def lora_modules(self, *names: str) -> list[str]:
        """Return the flag that serves the named adapters, or all of them."""
        chosen = names or tuple(self.adapters)
        return ["--lora-modules", *(f"{name}={self.adapters[name]}" for name in chosen)]


def build_world(family_name: str, folder: Path) -> World:
    """Write the model and its adapters below `folder`."""
    family = FAMILIES[family_name]
    base_folder = folder / "base"
    save_checkpoint(family, base_folder)
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    adapters = {}
    for number, recipe in enumerate(RECIPES):
        name = f"a{number:02}"
        adapters[name] = folder / name
        save_adapter(base, family, recipe, adapters[name], seed=100 + number)
    return World(
        family=family_name,
        folder=folder,
        base=base_folder,
        adapters=adapters,
        oracle=PeftOracle(base_folder, adapters),
    )
