"""Argument checks shared by all operators, in one message style: operator, argument, found, expected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

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


def check_rows(
    op: str, name: str, tensor: Tensor, routing: Routing, width: int, weights: StackedWeights
) -> None:
    """Check a `[T, width]` tensor of any supported dtype on the device of the weights.

    Raises:
        UnsupportedShapeError: the shape differs.
        KernelArgumentError: the dtype or the device does not fit.
    """
    if tensor.ndim != 2 or tensor.shape[0] != routing.num_tokens or tensor.shape[1] != width:
        raise UnsupportedShapeError(
            f"{op}: {name} is {list(tensor.shape)}, expected [{routing.num_tokens}, {width}]"
        )
    if tensor.dtype not in FLOATS:
        raise KernelArgumentError(
            f"{op}: {name} is {tensor.dtype}, expected float32, float16 or bfloat16"
        )
    if tensor.device != weights.a_storage.device:
        raise KernelArgumentError(
            f"{op}: {name} is on {tensor.device}, weights are on {weights.device}"
        )


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
