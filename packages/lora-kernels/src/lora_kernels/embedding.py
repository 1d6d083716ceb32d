"""embedding_lora_: formula, checks, and the choice of the backend.

For inference: no gradient flows through the operator.

Letters: `T` tokens, `D` embedding width, `R` max rank, `V` vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_kernels._aten import embedding as aten
from lora_kernels._aten.affine import apply_affine_
from lora_kernels.backend import Backend
from lora_kernels.checks import check_gains, check_output, check_pairing, check_token_ids
from lora_kernels.reference import embedding as reference

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.routing import Routing
    from lora_kernels.weights import StackedWeights


def embedding_lora_(
    y: Tensor,
    token_ids: Tensor,
    weights: StackedWeights,
    routing: Routing,
    *,
    backend: Backend = Backend.ATEN,
) -> Tensor:
    """Add the LoRA part of an embedding look-up, in place.

    Semantics: `y[t] += scale[e] * lora_b[0][slot[e], :, :r] @ lora_a[0][slot[e], :r, token_ids[t]]`
    with `t = token[e]`, then gains and biases as in `apply_lora_`. The sum over the entries of a
    token is in float32, rounded once. Rows of tokens without entry are neither read nor written,
    and their ids may be anything.

    Args:
        y: base embeddings, `[T, D]`, written in place; rows may be strided.
        token_ids: `[T]` int64 or int32, `0..V-1` for tokens with an entry.
        weights: one slice with `I = V` and `O = D`.
        routing: the step's entries.
        backend: the implementation.

    Returns:
        `y`.

    Raises:
        UnsupportedShapeError: `y` or `token_ids` has another shape, or there are several slices.
        KernelArgumentError: a token with an entry has an id outside the vocabulary; slots, dtypes
            or devices do not fit together; a slot with a gain is part of a weighted set. Nothing
            is written then.
    """
    check_pairing("embedding_lora_", routing, weights)
    check_token_ids("embedding_lora_", token_ids, routing, weights)
    check_output("embedding_lora_", y, routing, weights)
    check_gains("embedding_lora_", routing, weights)
    if routing.is_empty:
        return y
    with torch.no_grad():
        if backend is Backend.REFERENCE:
            return reference.embedding_lora_(y, token_ids, weights, routing)
        aten.embedding_lora_(y, token_ids, weights, routing)
        return apply_affine_(y, weights, routing)
