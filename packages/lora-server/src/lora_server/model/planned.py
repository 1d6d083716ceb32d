"""A model without numbers: built on torch's `meta` device from its configuration alone.

What it takes and what its attention would keep is read off it; no weight file is opened but for
the header that names a data type.
"""

from __future__ import annotations

import itertools
import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lora_server.config import Task
from lora_server.errors import StartupError

from .attention import PagedAttention
from .kv_cache import KvShape
from .load import find_source
from .pooling_load import POOLING_CLASSES, choose_task
from .pooling_model import head_paths

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PreTrainedConfig

    from lora_server.config import ServerConfig

_STACKED_DIMS: Final = 3
_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HEADER_BYTES: Final = 100_000_000


@dataclass(kw_only=True)
class PlannedModel:
    """A model as it would be loaded, on `meta`."""

    module: nn.Module
    text_config: PreTrainedConfig
    """Sizes of the language model."""
    task: Task
    """What it would be served for; not `auto`."""
    dtype: torch.dtype
    device: torch.device
    """Where it would run."""
    kv_shapes: Mapping[int, KvShape]
    """Layer -> what it keeps for a token; empty for models that do not generate."""
    context_length: int
    vocab_size: int
    head_paths: frozenset[str]
    """Paths of the modules that see the rows of a head; empty for models that generate."""
    notes: tuple[str, ...]
    """What a real load may find otherwise."""

    @property
    def has_head_rows(self) -> bool:
        """Whether some modules see the rows of a head, not those of the tokens."""
        return self.task is not Task.GENERATE

    @property
    def is_per_token(self) -> bool:
        """Whether its head reads every token."""
        return self.task is Task.TOKEN_CLASSIFY

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of keys and values a token takes over all layers."""
        return sum(shape.token_bytes(self.dtype) for shape in self.kv_shapes.values())


def build_planned(config: ServerConfig) -> PlannedModel:
    """Build the model that the options name.

    Raises:
        StartupError: there is nothing of that name, or no model that could be served.
    """
    source = find_source(config.model)
    task = Task(config.task)
    task = choose_task(config.model) if task is Task.AUTO else task
    attention = PagedAttention() if task is Task.GENERATE else None
    try:
        described = AutoConfig.from_pretrained(source)
        dtype = _dtype(described, config.dtype, Path(source))
        module = _build(described, task, dtype, attention)
    except (OSError, ValueError, KeyError) as error:
        raise StartupError([f"model {config.model}: {error}"]) from error
    text_config = described.get_text_config()
    shapes, notes = (
        ({}, []) if attention is None else _kv_shapes(module, attention, text_config, config.model)
    )
    return PlannedModel(
        module=module,
        text_config=text_config,
        task=task,
        dtype=dtype,
        device=torch.device(_device(config.device)),
        kv_shapes=shapes,
        context_length=int(text_config.max_position_embeddings),
        vocab_size=int(text_config.vocab_size),
        head_paths=frozenset() if task is Task.GENERATE else head_paths(module),
        notes=tuple(notes),
    )


def _device(name: str) -> str:
    if name != "auto":
        return str(name)
    return "cuda" if torch.cuda.is_available() else "cpu"


def _build(
    described: PreTrainedConfig, task: Task, dtype: torch.dtype, attention: PagedAttention | None
) -> nn.Module:
    auto: Any = AutoModelForCausalLM if attention is not None else POOLING_CLASSES[task]
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention.name}
    names = described.architectures or []
    if task is Task.SCORE and not any(n.endswith("ForSequenceClassification") for n in names):
        described.num_labels = 1  # a head is made up for it
    with torch.device("meta"):
        module: nn.Module = auto.from_config(described, dtype=dtype, **options)
    return module.eval().requires_grad_(requires_grad=False)


def _dtype(described: PreTrainedConfig, wanted: str, folder: Path) -> torch.dtype:
    """Return the type that a load would choose: the option, the configuration, the file."""
    if wanted != "auto":
        chosen: torch.dtype = getattr(torch, wanted)
        return chosen
    if isinstance(described.dtype, torch.dtype):
        return described.dtype
    return next(_stored_dtypes(folder), torch.float32)


def _stored_dtypes(folder: Path) -> Iterator[torch.dtype]:
    """Yield the floating types of the first weight file, by its header."""
    for path in sorted(folder.glob("*.safetensors"))[:1]:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(size, _MAX_HEADER_BYTES)))
        for entry in header.values():
            if entry.get("dtype") in _DTYPES:
                yield _DTYPES[entry["dtype"]]


def _kv_shapes(
    module: nn.Module, attention: PagedAttention, config: PreTrainedConfig, path: str
) -> tuple[dict[int, KvShape], list[str]]:
    """Run two tokens without numbers to see what each layer would keep.

    Raises:
        StartupError: no layer has attention.
    """
    notes: list[str] = []
    ids = torch.zeros((1, 2), dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode(), _without_experts(module):
            module(input_ids=ids, position_ids=ids, use_cache=False)
    except (NotImplementedError, RuntimeError):
        # Something in it looks at numbers, which there are none of.
        notes.append("KV cache: sizes are the configuration's; a layer that differs is not seen")
        return _described_shapes(config), notes
    if not attention.seen:
        raise StartupError([f"model {path}: no layer keeps keys and values; it cannot be served"])
    if len(attention.seen) < config.num_hidden_layers:
        notes.append(
            f"{len(attention.seen)} of {config.num_hidden_layers} layers keep keys and values;"
            " layers with another kind of state cannot be served"
        )
    return dict(sorted(attention.seen.items())), notes


def _described_shapes(config: PreTrainedConfig) -> dict[int, KvShape]:
    sizes: Any = config
    heads = sizes.num_attention_heads
    width = getattr(sizes, "head_dim", None) or sizes.hidden_size // heads
    kv_heads = getattr(sizes, "num_key_value_heads", None) or heads
    shape = KvShape(num_kv_heads=kv_heads, head_dim=width, value_head_dim=width)
    return dict.fromkeys(range(sizes.num_hidden_layers), shape)


@contextmanager
def _without_experts(module: nn.Module) -> Iterator[None]:
    """Let fused experts hand on what they get: which of them a token takes depends on numbers."""
    stacked = [
        child
        for child in module.modules()
        if any(p.ndim == _STACKED_DIMS for p in child.parameters(recurse=False))
        and hasattr(child, "down_proj")
    ]
    for child in stacked:
        child.forward = _hand_on  # put back below
    try:
        yield
    finally:
        for child in stacked:
            del child.forward


def _hand_on(hidden: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.empty_like(hidden)


def widest_output(module: nn.Module) -> int:
    """Return the most numbers a token has between two products of a layer, experts left out."""
    widths = [
        child.weight.shape[0]
        for path, child in module.named_modules()
        if isinstance(child, nn.Linear) and any(part.isdigit() for part in path.split("."))
    ]
    return max(itertools.chain(widths, [1]))
