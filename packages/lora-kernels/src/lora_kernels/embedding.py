"""embedding_lora_: formula, checks, and the choice of the backend.

For inference: no gradient flows through the operator.

Letters: `T` tokens, `D` embedding width, `R` max rank, `V` vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_kernels import dispatch, library
from lora_kernels.backend import Backend
from lora_kernels.checks import (
    check_backend,
    check_gains,
    check_output,
    check_pairing,
    check_token_ids,
)

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
    batch_invariant: bool = False,
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
        backend: the implementation. `triton` does not wait to learn of an id outside the
            vocabulary: such a token gets no delta, and no error.
        batch_invariant: as in `apply_lora_`.

    Returns:
        `y`.

    Raises:
        UnsupportedShapeError: `y` or `token_ids` has another shape, or there are several slices.
        KernelArgumentError: a token with an entry has an id outside the vocabulary; slots, dtypes
            or devices do not fit together; a slot with a gain is part of a weighted set. Nothing
            is written then.
        BackendUnavailableError: the backend cannot run where the tensors are.
    """
    if torch.compiler.is_compiling():
        step = library.step_arguments(weights, routing, backend, batch_invariant=batch_invariant)
        torch.ops.lora_kernels.embedding_lora_(y, token_ids, *step)
        return y
    check_pairing("embedding_lora_", routing, weights)
    check_backend("embedding_lora_", routing, backend)
    check_token_ids("embedding_lora_", token_ids, routing, weights)
    check_output("embedding_lora_", y, routing, weights)
    check_gains("embedding_lora_", routing, weights)
    if routing.is_empty:
        return y
    return dispatch.embedding_lora_(
        y, token_ids, weights, routing, backend=backend, batch_invariant=batch_invariant
    )
