"""A transformers causal language model, made ready for packed steps over paged keys and values.

Knows nothing of adapters: the model manager wraps the module afterwards.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from lora_server.errors import StartupError

from .attention import PagedAttention
from .greedy import find_largest
from .native.forward import NativeForward
from .native.fuse import fuse_layers
from .native.kernels import load_layer_kernels
from .native.layers import use_native_layers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from .attention_step import AttentionStep
    from .greedy import Largest
    from .kv_cache import KvCache, KvShape

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class LoadedModel:
    """A model, its tokenizer, and what the engine must know of both."""

    module: nn.Module
    tokenizer: PreTrainedTokenizerBase
    text_config: PreTrainedConfig
    """Sizes of the language model."""
    attention: PagedAttention
    kv_shapes: Mapping[int, KvShape]
    """Layer -> what it keeps for a token; layers without attention are left out."""
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    """Width of the logits."""
    context_length: int
    """Positions the model was made for."""
    end_token_ids: frozenset[int]
    """Tokens that end an answer."""

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of keys and values a token takes over all layers."""
        return sum(shape.token_bytes(self.dtype) for shape in self.kv_shapes.values())

    def use_cache(self, cache: KvCache) -> None:
        """Keep keys and values in `cache` from now on."""
        self.attention.cache = cache

    def use_native_layers(self) -> None:
        """Run parts of the layers as native kernels. Call it before LoRA is put in.

        Raises:
            BackendUnavailableError: they cannot be compiled or run here.
        """
        kernels = load_layer_kernels(self.dtype)
        if kernels is not None:
            use_native_layers(self.module, kernels)
            self.attention.kernels = kernels

    def fuse_layers(self) -> None:
        """Run decoder layers, or the whole model, as one native kernel. Call it after LoRA is in.

        Raises:
            BackendUnavailableError: the kernel cannot be compiled here.
        """
        fuse_layers(self.module, self.attention, self.dtype)

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Write zeros over blocks of the KV cache."""
        if self.attention.cache is not None and blocks:
            self.attention.cache.clear(blocks)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        step: AttentionStep,
        logits_idx: torch.Tensor,
    ) -> torch.Tensor:
        """Run one packed step.

        Args:
            input_ids: `[1, T]` int64.
            position_ids: `[1, T]` int64.
            step: which row belongs to which sequence.
            logits_idx: `[S]` int64 rows whose logits are wanted; may be empty.

        Returns:
            `[S, vocabulary]` logits.
        """
        self.attention.step = step
        output = self.module(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            logits_to_keep=logits_idx,
        )
        logits: torch.Tensor = output.logits
        return logits[0]

    def forward_greedy(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        step: AttentionStep,
        logits_idx: torch.Tensor,
    ) -> Largest:
        """Run one packed step as `forward` does; choose the largest logit of each wanted row.

        Args:
            input_ids: `[1, T]` int64.
            position_ids: `[1, T]` int64.
            step: which row belongs to which sequence.
            logits_idx: `[S]` int64 rows; at least one.
        """
        run = self.module.forward
        if isinstance(run, NativeForward):
            self.attention.step = step
            found = run.largest(input_ids, position_ids, logits_idx)
            if found is not None:
                return found
        logits = self.forward(input_ids, position_ids, step, logits_idx)
        return find_largest(logits, self.attention.kernels)


def load_model(path: str, *, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """Load a checkpoint.

    Args:
        path: folder in transformers' layout (safetensors, config, tokenizer), or the name of a
            repository in the local hub cache.
        dtype: `auto` takes the checkpoint's; else `float32`, `bfloat16` or `float16`.
        device: `auto` takes CUDA where there is one.

    Raises:
        StartupError: there is nothing of that name, or it holds no causal language model with a
            tokenizer, or the model keeps a state that is not keys and values.
    """
    source = find_source(path)
    target = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    )
    transformers_logging.disable_progress_bar()  # the log is the operator's
    attention = PagedAttention()
    try:
        config = AutoConfig.from_pretrained(source)
        tokenizer = AutoTokenizer.from_pretrained(source)
        module = AutoModelForCausalLM.from_pretrained(
            source,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=attention.name,
        )
    except (OSError, ValueError, KeyError) as error:
        raise StartupError([f"model {path}: {error}"]) from error
    torch.nn.Module.to(module, target)
    module = module.eval().requires_grad_(requires_grad=False)
    text_config = config.get_text_config()
    return LoadedModel(
        module=module,
        tokenizer=tokenizer,
        text_config=text_config,
        attention=attention,
        kv_shapes=_probe_shapes(module, attention, text_config, target),
        dtype=module.dtype,
        device=target,
        vocab_size=module.get_output_embeddings().weight.shape[0],
        context_length=int(text_config.max_position_embeddings),
        end_token_ids=_end_tokens(module, tokenizer),
    )


def find_source(path: str) -> str:
    """Return what transformers loads a model from: a folder, or a name in the local hub cache.

    Raises:
        StartupError: the folder is missing, or holds no model.
    """
    folder = Path(path).expanduser()
    if folder.exists() and not (folder / "config.json").is_file():
        found = sorted(p.name for p in folder.iterdir())[:8] if folder.is_dir() else "a file"
        raise StartupError([f"model {path}: expected a folder with a config.json, found {found}"])
    if not folder.exists() and (path.startswith(("/", ".", "~")) or path.count("/") > 1):
        raise StartupError([f"model {path}: no such folder"])
    return str(folder) if folder.exists() else path


def _probe_shapes(
    module: Any, attention: PagedAttention, config: PreTrainedConfig, device: torch.device
) -> dict[int, KvShape]:
    """Run two tokens through the model to see what each of its layers would keep.

    Raises:
        StartupError: some layer keeps what paged keys and values cannot hold.
    """
    name = type(module).__name__
    is_stateless = _is_stateless(module, device)
    seen = dict(sorted(attention.seen.items()))
    if not seen or not is_stateless:
        problem = (
            f"{name}: {len(seen)} of {config.num_hidden_layers} layers keep keys and values;"
            " layers with another kind of state cannot be served"
        )
        raise StartupError([problem])
    return seen


_STATE_TOLERANCE = 0.05
"""Relative difference that products over one row and over two may have in bfloat16; a state that
passes from one token to the next changes logits by much more."""


@torch.inference_mode()
def _is_stateless(module: Any, device: torch.device) -> bool:
    """Whether tokens reach each other through attention only.

    While shapes are probed the attention function answers zeros, so that a token's logits must not
    depend on the token before it: a convolution or a recurrence would show.
    """
    first, second = 3, 1
    pair = torch.tensor([[first, second]], device=device)
    start = torch.zeros_like(pair)
    packed = module(input_ids=pair, position_ids=start, use_cache=False).logits[0, 1].float()
    alone = module(input_ids=pair[:, 1:], position_ids=start[:, 1:], use_cache=False).logits[0, 0]
    difference = torch.linalg.vector_norm(packed - alone.float())
    return bool(difference <= _STATE_TOLERANCE * torch.linalg.vector_norm(packed))


def _end_tokens(module: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """End tokens named by the generation config, the model's config and the tokenizer."""
    named = [
        getattr(module.generation_config, "eos_token_id", None),
        getattr(module.config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ]
    found: set[int] = set()
    for value in named:
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(value)
    return frozenset(found)
