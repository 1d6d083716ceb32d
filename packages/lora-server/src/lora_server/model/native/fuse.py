"""Gives decoder layers their fast form, where it computes what they do.

Letters: `T` rows, `D` hidden width, `W` head width.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lora_kernels.native import load_library
from lora_server.model.attention_step import AttentionStep, DecodeGroup, PrefillChunk
from lora_server.model.kv_cache import KvCache

from .decoder import DecoderLayer, can_fuse, find_parts
from .decoder_step import StepTable

if TYPE_CHECKING:
    from torch import nn

    from lora_server.model.attention import PagedAttention

_log = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_NUM_BLOCKS = 8
_TOLERANCE = 0.03
"""Of the largest number: sums in another order, rounded to bfloat16 some ten times."""


@torch.inference_mode()
def fuse_layers(model: nn.Module, attention: PagedAttention, dtype: torch.dtype) -> int:
    """Run decoder layers as one kernel each, where they have that form. Call it after LoRA is in.

    Args:
        model: on the CPU, with the fast forms of `use_native_layers`.
        attention: the model's, which has seen its shapes.
        dtype: the model's.

    Returns:
        How many layers have one.

    Raises:
        BackendUnavailableError: the kernel cannot be compiled here.
    """
    found = [(layer, parts) for layer in model.modules() if (parts := find_parts(layer))]
    found = [(layer, parts) for layer, parts in found if can_fuse(parts, attention, dtype)]
    if not found:
        return 0
    run = load_library([Path(__file__).parent / "decoder.cpp"]).decoder_layer
    run.argtypes, run.restype = [ctypes.c_void_p] * 9, None
    table = StepTable()
    count = 0
    for layer, parts in found:
        fast = DecoderLayer(layer, parts, attention, table, run)
        if _agrees(layer, fast, attention, parts.layer_idx, parts.head_width):
            layer.forward = fast
            count += 1
    _log.info("%d decoder layers run as one kernel each", count)
    return count


def _agrees(
    layer: nn.Module, fast: DecoderLayer, attention: PagedAttention, index: int, width: int
) -> bool:
    """Whether a layer and its fast form give the same rows, and store the same keys and values."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    step, rows = _example_step()
    hidden = numbers(1, rows, fast.hidden_width)
    angles = numbers(1, rows, width), numbers(1, rows, width)
    caches = [_example_cache(attention, index) for _ in range(2)]
    stored = numbers(*caches[0].layers[index].shape)
    kept = attention.cache, attention.step
    results: list[Any] = []
    try:
        for forward, cache in zip((layer.forward, fast), caches, strict=True):
            cache.layers[index].copy_(stored)
            attention.cache, attention.step = cache, step
            results.append(forward(hidden.clone(), position_embeddings=angles))
    except (TypeError, ValueError, RuntimeError):
        return False  # a layer with other arguments
    finally:
        attention.cache, attention.step = kept
    if not fast.num_calls or not isinstance(results[0], torch.Tensor):
        return False
    fast.forget()
    states = [cache.layers[index] for cache in caches]
    return _are_close(results[1] - hidden, results[0] - hidden) and _are_close(*states)


def _example_step() -> tuple[AttentionStep, int]:
    """Return two sequences that bring one token, and one that goes on with five, and the rows."""
    chunk = PrefillChunk(start=2, num_tokens=5, context=19, blocks=torch.tensor([7, 2]))
    decode = DecodeGroup(
        rows=torch.tensor([0, 1]),
        blocks=torch.tensor([4, 4, 1, 6]),
        blocks_per_sequence=2,
        positions=torch.tensor([9, 20]),
    )
    slots = [
        4 * _BLOCK_SIZE + 9,
        6 * _BLOCK_SIZE + 4,
        *range(2 * _BLOCK_SIZE + 3, 2 * _BLOCK_SIZE + 8),
    ]
    step = AttentionStep(token_slots=torch.tensor(slots), decode=(decode,), prefill=(chunk,))
    return step, len(slots)


def _example_cache(attention: PagedAttention, index: int) -> KvCache:
    return KvCache(
        {index: attention.seen[index]},
        num_blocks=_NUM_BLOCKS,
        block_size=_BLOCK_SIZE,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def _are_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    bound = _TOLERANCE * float(expected.float().abs().max())
    return found.shape == expected.shape and torch.allclose(
        found.float(), expected.float(), rtol=_TOLERANCE, atol=bound
    )
