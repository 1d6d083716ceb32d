"""Small adapters for tests of this package and of those that use it."""

from __future__ import annotations

from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from lora_weights.config import AdapterConfig
from lora_weights.names import Part, build_key
from lora_weights.save import RawAdapter, save_adapter
from lora_weights.scaling import ScalingTable

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from lora_weights.bound import BoundPart
    from lora_weights.modules import LoraPair, ModulePart

FACTOR_STD = 0.5
"""Standard deviation of A and B: large enough that a tiny model's greedy text changes."""


def build_raw_adapter(
    modules: Mapping[str, tuple[int, int]],
    *,
    r: int = 8,
    alpha: float | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    embeddings: Mapping[str, tuple[int, int]] | None = None,
    std: float = FACTOR_STD,
    **config: object,
) -> RawAdapter:
    """Return a random adapter as PEFT would save it.

    Args:
        modules: linear module path -> (in, out).
        r: rank of modules that no ``rank_pattern`` in `config` matches.
        alpha: alpha; None is twice the rank.
        seed: of the generator; one seed gives one adapter.
        dtype: type of the stored tensors.
        embeddings: embedding path -> (vocabulary, width).
        std: standard deviation of A and B.
        **config: further fields of ``adapter_config.json``, or other values for those above.
    """
    embeddings = embeddings or {}
    names = sorted({path.rpartition(".")[2] for path in (*modules, *embeddings)})
    fields: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-random-model",
        "r": r,
        "lora_alpha": 2 * r if alpha is None else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "modules_to_save": None,
        "target_modules": names,
        "inference_mode": True,
        **config,
    }
    patterns = fields.get("rank_pattern")
    patterns = dict(patterns) if isinstance(patterns, dict) else {}
    ranks = ScalingTable(AdapterConfig(r=r, lora_alpha=1.0, rank_pattern=patterns))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for table, names_ab in (
        (modules, (Part.LORA_A, Part.LORA_B)),
        (embeddings, (Part.EMBEDDING_A, Part.EMBEDDING_B)),
    ):
        for path, (in_features, out_features) in table.items():
            rank = ranks.resolve(path).rank
            for part, shape in zip(
                names_ab, ((rank, in_features), (out_features, rank)), strict=True
            ):
                tensor = torch.randn(shape, generator=generator) * std
                tensors[build_key(path, part)] = tensor.to(dtype)
    return RawAdapter(config=fields, tensors=tensors)


def write_adapter(
    folder: str | os.PathLike[str],
    modules: Mapping[str, tuple[int, int]],
    *,
    r: int = 8,
    alpha: float | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    embeddings: Mapping[str, tuple[int, int]] | None = None,
    std: float = FACTOR_STD,
    **config: object,
) -> Path:
    """Write a random adapter and return its folder. Arguments as for `build_raw_adapter`."""
    raw = build_raw_adapter(
        modules,
        r=r,
        alpha=alpha,
        seed=seed,
        dtype=dtype,
        embeddings=embeddings,
        std=std,
        **config,
    )
    return save_adapter(raw, folder)


def pair_of(parts: Mapping[str, ModulePart | BoundPart], path: str) -> LoraPair:
    """Return the pair of a module that must have one."""
    pair = parts[path].pair
    assert pair is not None, f"{path} has no pair"
    return pair


def llama_modules(
    *,
    num_layers: int = 2,
    hidden: int = 64,
    inter: int = 128,
    kv: int = 32,
    prefix: str = "model.layers",
) -> dict[str, tuple[int, int]]:
    """Return the seven projections of a Llama-like decoder: module path -> (in, out).

    Args:
        num_layers: decoder layers.
        hidden: width of the hidden state, and of all query heads together.
        inter: width inside the MLP.
        kv: width of all key heads together.
        prefix: path of the layer list.
    """
    attention = {
        "q_proj": (hidden, hidden),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (hidden, hidden),
    }
    mlp = {"gate_proj": (hidden, inter), "up_proj": (hidden, inter), "down_proj": (inter, hidden)}
    return {
        f"{prefix}.{layer}.{block}.{name}": size
        for layer in range(num_layers)
        for block, table in (("self_attn", attention), ("mlp", mlp))
        for name, size in table.items()
    }


class _CountingFile(FileIO):
    """A file that notes which bytes of data are read from it."""

    def __init__(self, path: Path, offsets: set[int]) -> None:
        super().__init__(path)
        self._offsets = offsets

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, as the base does, and note the offsets."""
        start = self.tell()
        count = super().readinto(buffer)
        self._offsets.update(range(start, start + count))
        return count


@contextmanager
def count_reads() -> Iterator[set[int]]:
    """Note which bytes of weight files are read as data; headers do not count.

    Yields:
        The offsets in the files read within the block.
    """
    offsets: set[int] = set()
    plain = Path.open

    def opened(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.suffix == ".safetensors" and args[:1] == ("rb",):
            return _CountingFile(path, offsets)
        return plain(path, *args, **kwargs)

    with patch.object(Path, "open", opened):
        yield offsets
