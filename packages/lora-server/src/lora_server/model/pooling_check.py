"""Whether a model in a batch answers as transformers' own forward pass does for each sequence.

A wrong row for the head, positions that begin elsewhere, or a convolution that reaches into the
neighbour would all show here, before anything is served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from lora_server.errors import StartupError

from .pooling_attention import LengthGroup, PackedStep
from .pooling_inputs import pack, pad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .pooling_model import LoadedPooler

_LENGTHS: Final = (4, 3)
"""Of the sequences that are compared."""

_FIRST_TOKEN: Final = 3

_TOLERANCE: Final = 0.02
"""Relative difference between a batch and single passes; rounding in bfloat16 stays below, another
row or a leak between sequences is far above."""


def run_alone(pooler: LoadedPooler) -> list[torch.Tensor]:
    """Run transformers' own forward pass over each probe.

    Returns:
        Logits, or hidden states of a model without a head.

    Raises:
        StartupError: only some layers attend through the interface that makes packing possible.
    """
    results = []
    for token_ids in _probes(pooler):
        attention = pooler.attention
        before = 0 if attention is None else attention.num_calls
        if attention is not None:
            group = LengthGroup(length=len(token_ids), rows=slice(0, len(token_ids)))
            attention.step = PackedStep(groups=(group,))
        output = pooler.module(input_ids=torch.tensor([token_ids], device=pooler.device))
        if attention is not None:
            _check_calls(pooler, attention.num_calls - before)
        results.append(output.logits if hasattr(output, "logits") else output.last_hidden_state)
    return results


def check_batched(pooler: LoadedPooler, alone: Sequence[torch.Tensor]) -> None:
    """Compare a batch of the probes with each of them alone.

    Raises:
        StartupError: they differ.
    """
    probes = _probes(pooler)
    types = [[0] * len(ids) for ids in probes]
    if pooler.is_packed:
        hidden = pooler.hidden(pack(probes, types, device=pooler.device))
    else:
        hidden = pooler.hidden(
            pad(probes, types, pad_token_id=pooler.pad_token_id, device=pooler.device)
        )
    for ids, rows, expected in zip(probes, torch.split(hidden, list(_LENGTHS)), alone, strict=True):
        found = rows if pooler.head is None else pooler.logits(pooler.head_rows(rows, ids))
        wanted = expected.reshape(found.shape).float()
        if torch.linalg.vector_norm(found.float() - wanted) > _TOLERANCE * wanted.norm():
            name = type(pooler.module).__name__
            raise StartupError(
                [f"{name}: in a batch sequences are not what they are alone; it cannot be served"]
            )


def _probes(pooler: LoadedPooler) -> list[list[int]]:
    """Return short sequences without padding tokens, which some models treat by themselves."""
    usable = [i for i in range(_FIRST_TOKEN, pooler.vocab_size) if i != pooler.pad_token_id]
    tokens = iter(usable * sum(_LENGTHS))
    return [[next(tokens) for _ in range(length)] for length in _LENGTHS]


def _check_calls(pooler: LoadedPooler, num_calls: int) -> None:
    layers = int(pooler.text_config.num_hidden_layers)
    if num_calls not in {0, layers}:
        name = type(pooler.module).__name__
        raise StartupError(
            [f"{name}: {num_calls} of {layers} layers use the attention interface, expected all"]
        )
