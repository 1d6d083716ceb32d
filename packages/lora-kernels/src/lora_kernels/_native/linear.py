"""`apply_lora_` in one call of C++: both products, every segment, every slice.

Products and sums are in float32 whatever the dtype; the result is rounded once. The order of every
sum depends on the module's widths alone: a row has the same bits in any company that the kernel
takes. Steps in which a token has several entries run otherwise, so that this is not the form which
`batch_invariant` asks for.

Letters: `T` tokens, `E` entries, `G` segments, `N` slots, `P` slices, `I` in, `O` out.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from lora_kernels._native.kernels import native_kernels

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.routing import Routing
    from lora_kernels.weights import StackedWeights

    Table = tuple[int, list[Tensor]]

_DTYPES = (torch.float32, torch.bfloat16)


def can_apply(y: Tensor, x: Tensor, weights: StackedWeights, routing: Routing) -> bool:
    """Whether the kernel takes these arguments.

    `False` says nothing of whether they are right: shapes that do not fit, other dtypes, rows that
    are not contiguous, tokens with several entries, devices other than the CPU.
    """
    wanted = weights.derived.get(_wanted)
    if wanted is None or wanted[0] is not routing:
        # The same for every call of a step: worked out once, and compared at each.
        wanted = weights.derived[_wanted] = (routing, *_wanted(weights, routing))
    _, dtype, x_shape, y_shape = wanted
    return (
        x.dtype is dtype
        and y.dtype is dtype
        and x.shape == x_shape
        and y.shape == y_shape
        and x.stride(1) == 1
        and y.stride(1) == 1
        and x.is_cpu
        and y.is_cpu
    )


def _wanted(
    weights: StackedWeights, routing: Routing
) -> tuple[torch.dtype | None, tuple[int, int], tuple[int, int]]:
    """Return the dtype and shapes of x and y that the kernel takes; no dtype if it takes none."""
    x_shape = routing.num_tokens, weights.in_features
    y_shape = routing.num_tokens, weights.total_out_features
    return weights.dtype if _are_taken(weights, routing) else None, x_shape, y_shape


def _are_taken(weights: StackedWeights, routing: Routing) -> bool:
    return (
        weights.dtype in _DTYPES
        and weights.num_slots == routing.num_slots
        and not routing.has_repeated_tokens
        and not routing.is_padded
        and weights.device.type == routing.device.type == "cpu"
    )


def apply_lora_(y: Tensor, x: Tensor, weights: StackedWeights, routing: Routing) -> Tensor:
    """Add the pairs' part, without gains and biases; arguments for which `can_apply` holds."""
    call = native_kernels().apply_lora[weights.dtype]
    module, step = module_table(weights), step_table(routing)
    call(module[0], step[0], x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0))
    return y


def lora_addresses(
    weights: StackedWeights, routing: Routing, dtype: torch.dtype
) -> tuple[int, int] | None:
    """Return where `lora::Module` and `lora::Step` are, for kernels that add the pairs themselves.

    They stay there while `weights` and `routing` live; the first one, and whether there are any,
    depends on nothing of the routing but its slots and its kind of entries. None where the pairs
    are not all that a slot of the step adds, or where the kernel does not take them: see
    `can_apply`.
    """
    more = weights.gain_slots | weights.bias_slots
    if more and any(segment.slot in more for segment in routing.segments):
        return None
    if weights.dtype is not dtype or not _are_taken(weights, routing):
        return None
    return module_table(weights)[0], step_table(routing)[0]


def apply_lora_again_(y: Tensor, x: Tensor, weights: StackedWeights, routing: Routing) -> bool:
    """Add the pairs' part where all checks of the operator are known to hold.

    Returns:
        Whether it was done; `False` where anything is unusual, or a slot has a gain or a bias.
    """
    if weights.affine is not None or torch.is_grad_enabled():
        return False
    if not can_apply(y, x, weights, routing):
        return False
    apply_lora_(y, x, weights, routing)
    return True


def module_table(weights: StackedWeights) -> Table:
    """Return the address of `Module` of lora.cpp, made once, and what must live as long."""
    table: Table | None = weights.derived.get(module_table)
    if table is None:
        bounds = [0, *(end for _, end in weights.out_ranges)]
        ranges = torch.tensor(bounds, dtype=torch.int64)
        tensors = (weights.a_storage, weights.b_storage, weights.slot_table, ranges)
        sizes = (weights.num_slices, weights.num_slots)
        widths = (weights.in_features, weights.total_out_features)
        fields = torch.tensor([*(tensor.data_ptr() for tensor in tensors), *sizes, *widths])
        table = weights.derived[module_table] = fields.data_ptr(), [fields, ranges]
    return table


def step_address(routing: Routing) -> int:
    """Return where `lora::Step` of a routing is, as long as the routing lives."""
    return step_table(routing)[0]


def step_table(routing: Routing) -> tuple[int, list[object]]:
    """Return the address of `Step` of lora.cpp, made once a step, and what must live as long."""
    table: tuple[int, list[object]] | None = routing.derived.get(step_table)
    if table is None:
        names = (routing.token_idx, routing.scales, routing.seg_indptr, routing.seg_slots)
        tensors = [tensor.contiguous() for tensor in names]
        addresses = [tensor.data_ptr() for tensor in tensors]
        if routing.has_unit_scales:
            addresses[1] = 0
        fields = (ctypes.c_int64 * 5)(*addresses, len(routing.segments))
        table = routing.derived[step_table] = ctypes.addressof(fields), [fields, *tensors]
    return table
