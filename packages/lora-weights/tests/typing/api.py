"""User code for the type checker; it is checked and never run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_weights import (
    Adapter,
    AdapterReport,
    BoundPart,
    InvalidAdapterError,
    LoraPair,
    ModuleKind,
    ModuleShape,
    PackedPart,
    Problem,
    bind_adapter,
    inspect_adapter,
    load_adapter,
    pack_parts,
    save_adapter,
)

if TYPE_CHECKING:
    from pathlib import Path


def load_and_pack(folder: Path) -> dict[str, PackedPart]:
    """Load, bind and pack as an engine does."""
    adapter: Adapter = load_adapter(folder, dtype=torch.bfloat16, max_rank=64)
    shapes = {
        "model.embed_tokens": ModuleShape(
            in_features=128, out_features=64, kind=ModuleKind.EMBEDDING
        ),
        "lm_head": ModuleShape(in_features=64, out_features=128),
    }
    parts: dict[str, BoundPart] = bind_adapter(adapter, shapes, max_rank=64)
    packed = pack_parts(parts, {"qkv_proj": ("q_proj", "k_proj", "v_proj")})
    pairs: tuple[LoraPair | None, ...] = packed["qkv_proj"].slices
    del pairs
    saved: Path = save_adapter(adapter, "copy")
    del saved
    return packed


def reasons(source: str) -> tuple[Problem, ...]:
    """Ask for all reasons, with and without an exception."""
    report: AdapterReport = inspect_adapter(source)
    try:
        load_adapter(source)
    except InvalidAdapterError as error:
        return error.problems
    return report.problems
