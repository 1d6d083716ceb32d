"""shrink, expand_ and apply_lora_: formula, checks, and the choice of the backend.

For inference: no gradient flows through the operators.

Letters: `T` tokens, `E` entries, `N` slots, `R` max rank, `I` in, `O` out, `P` slices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_kernels import dispatch, library
from lora_kernels._aten import linear as aten
from lora_kernels._native import linear as native
from lora_kernels.backend import Backend
from lora_kernels.checks import (
    check_activations,
    check_backend,
    check_buffer,
    check_gains,
    check_output,
    check_pairing,
)

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.routing import Routing
    from lora_kernels.weights import StackedWeights


def shrink(
    x: Tensor,
    weights: StackedWeights,
    routing: Routing,
    *,
    backend: Backend = Backend.ATEN,
    batch_invariant: bool = False,
) -> Tensor:
    """Project each entry's token to its adapter's rank.

    Semantics: `v[p, e, :r] = lora_a[p][slot[e], :r] @ x[token[e]]` with `r` the true rank of the
    slot's slice `p`; `v[p, e, r:] = 0`. Scales are not applied here.

    With many entries a segment this is SGMV (prefill), with one or two it is BGMV (decode); the
    operator is the same, and `routing.tile` says which kernels the backend triton launches.
    Sums are in float32 whatever the dtypes.

    Args:
        x: activations, `[T, I]`, any strides.
        weights: the module's slots.
        routing: the step's entries.
        backend: the implementation.
        batch_invariant: fix the order of every sum, so that a row has the same bits whatever
            other rows and adapters the step has. Slower.

    Returns:
        `[P, E, R]` float32. Without entries `[P, 0, R]`.

    Raises:
        UnsupportedShapeError: `x` is not `[T, I]`.
        KernelArgumentError: slots, dtypes or devices do not fit together.
        BackendUnavailableError: the backend cannot run where the tensors are.
    """
    if torch.compiler.is_compiling():
        step = library.step_arguments(weights, routing, backend, batch_invariant=batch_invariant)
        return torch.ops.lora_kernels.shrink(x, *step)  # type: ignore[no-any-return]
    check_pairing("shrink", routing, weights)
    check_backend("shrink", routing, backend)
    check_activations("shrink", x, routing, weights)
    if routing.is_empty:
        return x.new_empty((weights.num_slices, 0, weights.max_rank), dtype=torch.float32)
    return dispatch.shrink(x, weights, routing, backend=backend, batch_invariant=batch_invariant)


def expand_(
    y: Tensor,
    v: Tensor,
    weights: StackedWeights,
    routing: Routing,
    *,
    backend: Backend = Backend.ATEN,
    batch_invariant: bool = False,
) -> Tensor:
    """Add each entry's output to its token's row, in place.

    Semantics: `y[token[e], off_p : off_p + O_p] += scale[e] * B_p @ v[p, e, :r]` with
    `B_p = lora_b[p][slot[e], :, :r]` and `off_p` the sum of the widths before slice `p`. Slices
    may have different widths; an absent slice adds nothing. The sum over all entries of a token
    is in float32 and rounded to the dtype of `y` once. Gains and biases follow, as in
    `apply_lora_`. Rows of tokens without entry are neither read nor written.

    Args:
        y: base output, `[T, sum O_p]`, written in place; rows may be strided.
        v: result of `shrink`, `[P, E, R]` float32.
        weights: the module's slots.
        routing: the step's entries.
        backend: the implementation.
        batch_invariant: fix the order of every sum, so that a row has the same bits whatever
            other rows and adapters the step has. Slower.

    Returns:
        `y`.

    Raises:
        UnsupportedShapeError: `y` or `v` has another shape.
        KernelArgumentError: slots, dtypes or devices do not fit together, or a slot with a gain is
            part of a weighted set.
        BackendUnavailableError: the backend cannot run where the tensors are.
    """
    if torch.compiler.is_compiling():
        step = library.step_arguments(weights, routing, backend, batch_invariant=batch_invariant)
        torch.ops.lora_kernels.expand_(y, v, *step)
        return y
    check_pairing("expand_", routing, weights)
    check_backend("expand_", routing, backend)
    check_output("expand_", y, routing, weights)
    check_buffer("expand_", v, routing, weights)
    check_gains("expand_", routing, weights)
    if routing.is_empty:
        return y
    return dispatch.expand_(
        y, v, weights, routing, backend=backend, batch_invariant=batch_invariant
    )


def apply_lora_(
    y: Tensor,
    x: Tensor,
    weights: StackedWeights,
    routing: Routing,
    *,
    backend: Backend = Backend.ATEN,
    batch_invariant: bool = False,
) -> Tensor:
    """Add the LoRA part of a (packed) linear module, in place: `expand_` of `shrink`.

    Semantics: `y[token[e], off_p : off_p + O_p] += scale[e] * B_p @ (A_p @ x[token[e]])` with
    `A_p = lora_a[p][slot[e], :r]` and `B_p = lora_b[p][slot[e], :, :r]`; then, where slots have a
    gain or a bias, `y[t] = gain[slot[e]] * y[t] + sum_e scale[e] * bias[slot[e]]`, with or without
    pairs. A gain is not linear in a scale, so its slot's tokens have one entry of scale 1.

    Rows of tokens without entry stay bit for bit as they are. A slot that no entry names never
    reaches an output, whatever it holds.

    Args:
        y: base output, `[T, sum O_p]`, written in place; rows may be strided.
        x: activations, `[T, I]`, any strides.
        weights: the module's slots.
        routing: the step's entries.
        backend: the implementation.
        batch_invariant: fix the order of every sum, so that a row has the same bits whatever
            other rows and adapters the step has. Slower.

    Returns:
        `y`.

    Raises:
        UnsupportedShapeError: `y` or `x` has another shape.
        KernelArgumentError: slots, dtypes or devices do not fit together, or a slot with a gain is
            part of a weighted set.
        BackendUnavailableError: the backend cannot run where the tensors are.
    """
    if torch.compiler.is_compiling():
        step = library.step_arguments(weights, routing, backend, batch_invariant=batch_invariant)
        torch.ops.lora_kernels.apply_lora_(y, x, *step)
        return y
    is_native = backend is Backend.NATIVE and not batch_invariant
    if is_native and native.apply_lora_again_(y, x, weights, routing):
        return y
    is_aten = backend is Backend.ATEN and not batch_invariant
    if is_aten and aten.apply_lora_again_(y, x, weights, routing):
        return y
    check_pairing("apply_lora_", routing, weights)
    check_backend("apply_lora_", routing, backend)
    check_activations("apply_lora_", x, routing, weights)
    check_output("apply_lora_", y, routing, weights)
    check_gains("apply_lora_", routing, weights)
    if routing.is_empty:
        return y
    return dispatch.apply_lora_(
        y, x, weights, routing, backend=backend, batch_invariant=batch_invariant
    )
