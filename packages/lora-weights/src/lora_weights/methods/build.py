"""Factors of VeRA, LoHa and LoKr out of a module's tensors, whichever method it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_weights.methods.loha import LohaFactors
from lora_weights.methods.lokr import LokrFactors, build_factor
from lora_weights.methods.vera import VeraFactors
from lora_weights.names import Part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lora_weights.methods.factors import Factors
    from lora_weights.tensor_format import TensorEntry


def build_factors(
    peft_type: str,
    tensors: Mapping[Part, torch.Tensor],
    shared: Mapping[Part, torch.Tensor],
    *,
    rank: int,
    alpha: float,
    dtype: torch.dtype,
) -> Factors:
    """Return the factors of one module.

    Args:
        peft_type: VERA, LOHA or LOKR.
        tensors: the module's tensors of that method, checked.
        shared: VeRA's matrices.
        rank: rank of the module by the configuration.
        alpha: alpha of the module.
        dtype: type of the pair that is made of them.
    """
    if peft_type == "VERA":
        return VeraFactors(
            lambda_b=tensors[Part.VERA_B],
            lambda_d=tensors[Part.VERA_D],
            shared_a=shared[Part.VERA_SHARED_A],
            shared_b=shared[Part.VERA_SHARED_B],
            dtype=dtype,
        )
    if peft_type == "LOHA":
        return LohaFactors(
            w1_a=tensors[Part.HADA_W1_A],
            w1_b=tensors[Part.HADA_W1_B],
            w2_a=tensors[Part.HADA_W2_A],
            w2_b=tensors[Part.HADA_W2_B],
            alpha=alpha,
            dtype=dtype,
        )
    return LokrFactors(
        w1=build_factor(tensors, 0),
        w2=build_factor(tensors, 1),
        stored_rank=rank,
        alpha=alpha,
        dtype=dtype,
    )


def exact_rank(
    peft_type: str,
    parts: Mapping[Part, TensorEntry],
    shared: Mapping[Part, TensorEntry],
    *,
    rank: int,
) -> int:
    """Return the rank of the pair that a module's factors make, from their shapes alone.

    Args:
        peft_type: VERA, LOHA or LOKR.
        parts: the module's tensors of that method, checked.
        shared: VeRA's matrices.
        rank: rank of the module by the configuration.
    """
    factors = build_factors(
        peft_type,
        {part: torch.empty(entry.shape, device="meta") for part, entry in parts.items()},
        {part: torch.empty(entry.shape, device="meta") for part, entry in shared.items()},
        rank=rank,
        alpha=float(rank),
        dtype=torch.float32,
    )
    return factors.rank()
