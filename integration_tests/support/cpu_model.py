"""The small real model of the CPU goals, random adapters for it, and bytes to compare with.

Adapters are bfloat16, on all seven projections; nobody reads what they say.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from lora_server.model.demo import prepare_base
from support.adapters import CONFIG, WEIGHTS

if TYPE_CHECKING:
    from pathlib import Path

_COPY_BYTES = 256 * 2**20
_NUM_COPIES = 9


def copy_bytes_per_s() -> float:
    """Measure a large copy on all threads; bytes read and bytes written both count."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = []
    for _ in range(_NUM_COPIES):
        start_s = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start_s)
    return 2 * _COPY_BYTES / statistics.median(times)


@dataclass(frozen=True, kw_only=True)
class CpuModel:
    """A Llama checkpoint and the sizes of its projections."""

    folder: Path
    num_layers: int
    linears: dict[str, tuple[int, int]]
    """Module of a layer -> (in, out)."""

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the weights, which a step has to read once."""
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))

    @property
    def num_linear_weights(self) -> int:
        """Weights of all projections: multiply-adds of a token, without attention and head."""
        return self.num_layers * sum(a * b for a, b in self.linears.values())

    def num_adapter_weights(self, rank: int) -> int:
        """Weights of an adapter, which are the multiply-adds it adds to a token as well."""
        return self.num_layers * rank * sum(sum(sizes) for sizes in self.linears.values())

    def adapter_bytes(self, rank: int) -> int:
        """Bytes of an adapter."""
        return self.num_adapter_weights(rank) * torch.bfloat16.itemsize

    def save_adapter(self, folder: Path, *, rank: int, seed: int) -> None:
        """Write an adapter of all projections."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for layer in range(self.num_layers):
            for name, (num_in, num_out) in self.linears.items():
                path = f"base_model.model.model.layers.{layer}.{name}"
                a = torch.randn(rank, num_in, generator=generator) * 0.02
                b = torch.randn(num_out, rank, generator=generator) * 0.02
                tensors[f"{path}.lora_A.weight"] = a.to(torch.bfloat16)
                tensors[f"{path}.lora_B.weight"] = b.to(torch.bfloat16)
        folder.mkdir(parents=True)
        save_file(tensors, folder / WEIGHTS)
        modules = sorted(name.rpartition(".")[2] for name in self.linears)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
        (folder / CONFIG).write_text(json.dumps(config))


def prepare_model() -> CpuModel:
    """Return SmolLM2-135M as `lora-server demo --prepare` converts it, from the cache if there."""
    folder = prepare_base()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    linears = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    return CpuModel(folder=folder, num_layers=config["num_hidden_layers"], linears=linears)
