"""Gives decoder layers, and models of them, their fast form, where it computes what they do.

Letters: `T` rows, `D` hidden width, `W` head width.
"""

from __future__ import annotations

import ctypes
import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lora_kernels.native import load_library
from lora_server.model.attention_step import AttentionStep, DecodeGroup, PrefillChunk
from lora_server.model.kv_cache import KvCache

from .decoder import DecoderLayer, DecoderStack
from .decoder_parts import can_fuse, find_parts
from .forward import NativeForward, find_model_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from lora_server.model.attention import PagedAttention

    from .decoder_parts import LayerParts

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_LAYERS_ARGUMENTS: list[Any] = [_POINTER, _SIZE, _POINTER, _POINTER, _POINTER]
_MODEL_ARGUMENTS: list[Any] = [_POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER]
_log = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_NUM_BLOCKS = 8
_FIRST_PLACE = 50
"""Before the first position of the example: its angles differ enough to be told apart."""
_TOLERANCE = 0.03
"""Of the largest number: sums in another order, rounded to bfloat16 some ten times."""


@torch.inference_mode()
def fuse_layers(model: nn.Module, attention: PagedAttention, dtype: torch.dtype) -> int:
    """Run decoder layers as native kernels, where they have that form. Call it after LoRA is in.

    Each layer's fast form is kept only where it agrees with the layer's own forward on random
    numbers. The model's own forward gets one too, which runs all layers in one call with what is
    around them, where both give the same bits.

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
    cells = {id(part.stack.cell) for _, parts in found for part in parts.projections}
    if not found or len(cells) > 1 or len({parts.head_width for _, parts in found}) > 1:
        return 0
    library = load_library([Path(__file__).parent / "decoder.cpp"])
    run = library.decoder_layers
    run.argtypes, run.restype = _LAYERS_ARGUMENTS, None
    cell = found[0][1].projections[0].stack.cell
    example = _Example(attention)
    agreeing = [
        (layer, parts)
        for layer, parts in found
        if example.agrees(layer, DecoderStack([parts], cell, attention, run), parts)
    ]
    if not agreeing:
        return 0
    stack = DecoderStack([parts for _, parts in agreeing], cell, attention, run)
    for index, (layer, _) in enumerate(agreeing):
        layer.forward = DecoderLayer(stack, index, layer.forward)
    is_whole = len(agreeing) == len(attention.seen) and _fuse_model(model, stack, example, library)
    how = "in one call with the model" if is_whole else "each"
    _log.info("%d decoder layers run natively, %s", len(agreeing), how)
    return len(agreeing)


def _fuse_model(
    model: nn.Module, stack: DecoderStack, example: _Example, library: ctypes.CDLL
) -> bool:
    """Give the model a forward of its own, if it has one that computes the same."""
    parts = find_model_parts(model, torch.bfloat16)
    if parts is None:
        return False
    run = library.decoder_model
    run.argtypes, run.restype = _MODEL_ARGUMENTS, ctypes.c_int
    forward = NativeForward(parts, stack, run, model.forward)
    if not example.agrees_whole(model, forward):
        return False
    model.forward = forward
    return True


class _Example:
    """Two sequences that bring one token each and one that goes on with five, on random numbers."""

    def __init__(self, attention: PagedAttention) -> None:
        self._attention = attention
        self._generator = torch.Generator().manual_seed(0)
        chunk = PrefillChunk(start=2, num_tokens=5, context=19, blocks=torch.tensor([7, 2]))
        decode = DecodeGroup(
            rows=torch.tensor([0, 1]),
            blocks=torch.tensor([4, 4, 1, 6]),
            blocks_per_sequence=2,
            positions=torch.tensor([9, 20]),
        )
        places = [(4, 9), (6, 4), *((2, offset) for offset in range(3, 8))]
        slots = [block * _BLOCK_SIZE + offset for block, offset in places]
        self._rows = len(slots)
        self._step = AttentionStep(
            token_slots=torch.tensor(slots), decode=(decode,), prefill=(chunk,)
        )

    def agrees(self, layer: nn.Module, stack: DecoderStack, parts: LayerParts) -> bool:
        """Whether a layer and its fast form give the same rows, keys and values."""
        rows, index = self._rows, parts.layer_idx
        hidden = self._numbers(1, rows, stack.hidden_width)
        angles = self._numbers(1, rows, parts.head_width), self._numbers(1, rows, parts.head_width)
        own, other = self._cache([index]), self._cache([index])
        other.layers[index].copy_(own.layers[index])
        try:
            with self._using(own):
                expected = layer(hidden.clone(), position_embeddings=angles)
        except (TypeError, ValueError, RuntimeError):
            return False  # a layer with other arguments
        with self._using(other):
            found = stack.run(0, hidden, angles)
        if found is None or not isinstance(expected, torch.Tensor):
            return False
        is_same = _are_close(found - hidden, expected - hidden)
        return is_same and _are_close(other.layers[index], own.layers[index])

    def agrees_whole(self, model: nn.Module, forward: NativeForward) -> bool:
        """Whether a model and its fast form give the same logits, to the last bit."""
        cache = self._cache(list(self._attention.seen))
        ids = torch.arange(1, self._rows + 1).unsqueeze(0)
        places = _FIRST_PLACE + ids
        kept = torch.tensor([self._rows - 1, 1])
        results = []
        for run in (model, forward):
            with self._using(cache):  # a step writes its own keys before it reads them
                logits = run(
                    input_ids=ids, position_ids=places, use_cache=False, logits_to_keep=kept
                ).logits
            results.append(logits)
        # The same kernels on the same numbers: not close, but equal.
        return torch.equal(*results)

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).bfloat16()

    def _cache(self, layers: list[int]) -> KvCache:
        cache = KvCache(
            {index: self._attention.seen[index] for index in layers},
            num_blocks=_NUM_BLOCKS,
            block_size=_BLOCK_SIZE,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
        for store in cache.layers.values():
            store.copy_(self._numbers(*store.shape))
        return cache

    @contextmanager
    def _using(self, cache: KvCache) -> Iterator[None]:
        kept = self._attention.cache, self._attention.step
        self._attention.cache, self._attention.step = cache, self._step
        try:
            yield
        finally:
            self._attention.cache, self._attention.step = kept


def _are_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    bound = _TOLERANCE * float(expected.float().abs().max())
    return found.shape == expected.shape and torch.allclose(
        found.float(), expected.float(), rtol=_TOLERANCE, atol=bound
    )
