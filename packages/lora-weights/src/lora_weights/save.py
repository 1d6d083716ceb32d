"""Writes adapters in PEFT's layout: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lora_weights.adapter import Adapter
from lora_weights.fields import CONFIG_FILE
from lora_weights.sources.folder import WEIGHT_FILES
from lora_weights.tensors import write_safetensors
from lora_weights.unfold import unfold_config, unfold_tensors

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawAdapter:
    """An adapter as its files hold it: nothing folded, nothing renamed."""

    config: Mapping[str, object]
    """Content of ``adapter_config.json``."""
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    """Tensor key -> tensor, as PEFT names them."""


def save_adapter(adapter: Adapter | RawAdapter, folder: str | os.PathLike[str]) -> Path:
    """Write an adapter so that PEFT loads it again.

    A `RawAdapter` is written as it is. An `Adapter` of a LoRA has its scaling in B already; it is
    written with a configuration whose scaling is exactly 1 for every module, so that the values
    read back are bit-equal. Its digest is then another one, since the stored tensors are.

    Args:
        adapter: what to write.
        folder: created where needed; the two files in it are replaced.

    Returns:
        The folder.
    """
    raw = unfolded(adapter) if isinstance(adapter, Adapter) else adapter
    target = Path(folder).expanduser()
    target.mkdir(parents=True, exist_ok=True)
    # The weights come last: whoever sees them sees the configuration they belong to.
    text = json.dumps(raw.config, indent=2, default=_json_value)
    (target / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    weights = target / WEIGHT_FILES[0]
    partial = weights.with_suffix(".partial")
    write_safetensors(partial, raw.tensors)
    partial.replace(weights)
    return target


def _json_value(value: object) -> object:
    """Return mappings and tuples from a checked configuration in JSON's own types."""
    if hasattr(value, "items"):
        return dict(value.items())
    return list(value)  # type: ignore[call-overload]


def unfolded(adapter: Adapter) -> RawAdapter:
    """Return an adapter in the form that PEFT's files have."""
    return RawAdapter(config=unfold_config(adapter), tensors=unfold_tensors(adapter))
