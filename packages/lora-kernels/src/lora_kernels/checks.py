"""Argument checks shared by all operators: one message style, before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_kernels.backend import Backend
from lora_kernels.errors import KernelArgumentError, UnsupportedShapeError

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.routing import Routing
    from lora_kernels.weights import StackedWeights

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_pairing(op: str, routing: Routing, weights: StackedWeights) -> None:
    """Check that routing and weights are made for each other.

    Raises:
        KernelArgumentError: slots or devices differ.
    """
    if routing.num_slots != weights.num_slots:
        raise KernelArgumentError(
            f"{op}: routing is for {routing.num_slots} slots, weights have {weights.num_slots}"
        )
    if routing.token_idx.device != weights.a_storage.device:
        raise KernelArgumentError(
            f"{op}: routing is on {routing.device}, weights are on {weights.device}"
        )


def check_activations(op: str, x: Tensor, routing: Routing, weights: StackedWeights) -> None:
    """Check `x`: `[T, I]`, any supported dtype, on the device of the weights.

    Raises:
        UnsupportedShapeError: the shape differs.
        KernelArgumentError: the dtype or the device does not fit.
    """
    _check_rows(f"{op}: x", x, (routing.num_tokens, weights.in_features), weights)


def check_output(op: str, y: Tensor, routing: Routing, weights: StackedWeights) -> None:
    """Check `y`: `[T, sum O_p]`, any supported dtype, on the device of the weights.

    Raises:
        UnsupportedShapeError: the shape differs.
        KernelArgumentError: the dtype or the device does not fit.
    """
    _check_rows(f"{op}: y", y, (routing.num_tokens, weights.total_out_features), weights)


def check_buffer(op: str, v: Tensor, routing: Routing, weights: StackedWeights) -> None:
    """Check the `[P, E, R]` float32 buffer between shrink and expand.

    Raises:
        UnsupportedShapeError: the shape differs.
        KernelArgumentError: the dtype is not float32.
    """
    expected = [weights.num_slices, routing.num_entries, weights.max_rank]
    if list(v.shape) != expected:
        raise UnsupportedShapeError(f"{op}: v is {list(v.shape)}, expected {expected}")
    if v.dtype != torch.float32:
        raise KernelArgumentError(f"{op}: v is {v.dtype}, expected float32")


def check_gains(op: str, routing: Routing, weights: StackedWeights) -> None:
    """Check that a slot with a gain, which is not linear in a scale, is alone on its tokens.

    Raises:
        KernelArgumentError: such a slot is scaled, or shares a token with another entry.
    """
    if weights.gain_slots and (mixed := weights.gain_slots & routing.mixed_slots):
        raise KernelArgumentError(
            f"{op}: slots {sorted(mixed)} have an output gain and are part of a weighted set, "
            "expected one entry of scale 1 for each of their tokens"
        )


def check_backend(op: str, routing: Routing, backend: Backend) -> None:
    """Check that a routing of fixed shapes meets the backend that skips its padding.

    Raises:
        KernelArgumentError: the routing is a view of `RoutingBuffers`, the backend another one.
    """
    if routing.is_padded and backend is not Backend.TRITON:
        raise KernelArgumentError(
            f"{op}: routing is a view of RoutingBuffers, backend is {backend}, expected triton"
        )


def check_ids(op: str, token_ids: Tensor, weights: StackedWeights, routing: Routing) -> Tensor:
    """Check the values of the ids of an embedding look-up, on the host.

    Returns:
        The id of each entry's token, `[E]`.

    Raises:
        KernelArgumentError: a token with an entry has an id outside the vocabulary.
    """
    ids = token_ids.index_select(0, routing.token_idx)
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= weights.in_features:
        raise KernelArgumentError(
            f"{op}: token_ids of adapter tokens reach from {low} to {high}, "
            f"expected 0..{weights.in_features - 1}"
        )
    return ids


def check_token_ids(op: str, token_ids: Tensor, routing: Routing, weights: StackedWeights) -> None:
    """Check the ids of an embedding look-up; values of base tokens are never read.

    Raises:
        UnsupportedShapeError: not one id a token, or more than one slice.
        KernelArgumentError: the ids are not integers.
    """
    if weights.num_slices != 1:
        raise UnsupportedShapeError(
            f"{op}: weights have {weights.num_slices} slices, expected 1 for an embedding"
        )
    if token_ids.shape != (routing.num_tokens,):
        raise UnsupportedShapeError(
            f"{op}: token_ids is {list(token_ids.shape)}, expected [{routing.num_tokens}]"
        )
    if token_ids.dtype not in (torch.int64, torch.int32):
        raise KernelArgumentError(f"{op}: token_ids is {token_ids.dtype}, expected int64 or int32")


def _check_rows(
    where: str, tensor: Tensor, shape: tuple[int, int], weights: StackedWeights
) -> None:
    if tensor.shape != shape:
        raise UnsupportedShapeError(f"{where} is {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype not in FLOATS:
        raise KernelArgumentError(
            f"{where} is {tensor.dtype}, expected float32, float16 or bfloat16"
        )
    if tensor.device != weights.device:
        raise KernelArgumentError(f"{where} is on {tensor.device}, weights on {weights.device}")
