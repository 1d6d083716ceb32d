"""What is measured: adapters with the shapes of a real model, read into packed form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_weights import (
    ModuleShape,
    bind_adapter,
    inspect_adapter,
    load_adapter,
    pack_parts,
)
from lora_weights.testing import llama_modules, write_adapter

if TYPE_CHECKING:
    from pathlib import Path

    from lora_weights import PackedPart

SMOLLM2 = llama_modules(num_layers=30, hidden=576, inter=1536, kv=192)
"""The 210 projections of SmolLM2-135M: module path -> (in, out)."""

SHAPES = {path: ModuleShape(in_features=i, out_features=o) for path, (i, o) in SMOLLM2.items()}

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What Llama-like models fuse."""


def write_case(folder: Path, *, rank: int) -> Path:
    """Write a bfloat16 adapter for all 210 modules: 9.8 MB at rank 16, 19.5 MB at rank 32."""
    return write_adapter(folder, SMOLLM2, r=rank, dtype=torch.bfloat16)


def weights_of(folder: Path) -> Path:
    """Return the weight file of an adapter."""
    return folder / "adapter_model.safetensors"


def load_packed(folder: Path) -> dict[str, PackedPart]:
    """Read an adapter, match it with its model and pack it: ready for a device."""
    adapter = load_adapter(folder)
    return pack_parts(bind_adapter(adapter, SHAPES, max_rank=adapter.rank), PACKED)


def read_plain(folder: Path) -> bytes:
    """Read the weight file and nothing more: the floor."""
    return weights_of(folder).read_bytes()


def inspect_headers(folders: list[Path]) -> int:
    """Inspect adapters by their headers; return how many had no problem."""
    reports = [inspect_adapter(folder, read_tensors=False) for folder in folders]
    return sum(not report.problems for report in reports)


def write_many(root: Path, count: int) -> list[Path]:
    """Write adapters of 210 modules each whose weights are links to one file."""
    first = write_case(root / "0000", rank=8)
    folders = [first]
    for i in range(1, count):
        folder = root / f"{i:04d}"
        folder.mkdir()
        for path in first.iterdir():
            (folder / path.name).hardlink_to(path)
        folders.append(folder)
    return folders
