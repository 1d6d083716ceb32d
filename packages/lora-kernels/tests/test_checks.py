"""What the operators refuse, before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from lora_kernels import (
    KernelArgumentError,
    UnsupportedShapeError,
    apply_lora_,
    expand_,
    route_tokens,
    shrink,
)

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def step(make_step: Callable[..., Any]) -> Any:
    return make_step(entries=[(0, 0, 1.0), (1, 1, 1.0)], num_tokens=3, ranks=[(4,), (4,)])


@pytest.mark.parametrize(
    ("shape", "message"),
    [((3, 41), r"x is \[3, 41\], expected \[3, 40\]"), ((2, 40), "x is"), ((3, 40, 1), "x is")],
)
def test_x_of_another_shape_is_refused(step: Any, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UnsupportedShapeError, match=message):
        shrink(torch.zeros(shape), step.weights, step.routing)
    with pytest.raises(UnsupportedShapeError, match=message):
        apply_lora_(step.y, torch.zeros(shape), step.weights, step.routing)


@pytest.mark.parametrize("shape", [(3, 25), (4, 24), (24,)])
def test_y_of_another_shape_is_refused(step: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedShapeError, match=r"apply_lora_: y is .* expected \[3, 24\]"):
        apply_lora_(torch.zeros(shape), step.x, step.weights, step.routing)


def test_y_is_not_written_when_an_argument_is_refused(step: Any) -> None:
    before = step.y.clone()

    with pytest.raises(UnsupportedShapeError):
        apply_lora_(step.y, step.x[:, :-1], step.weights, step.routing)

    assert torch.equal(step.y, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_other_dtypes_are_refused(step: Any, dtype: torch.dtype) -> None:
    with pytest.raises(KernelArgumentError, match="expected float32, float16 or bfloat16"):
        apply_lora_(step.y.to(dtype), step.x, step.weights, step.routing)
    with pytest.raises(KernelArgumentError, match="expected float32, float16 or bfloat16"):
        shrink(step.x.to(dtype), step.weights, step.routing)


def test_a_routing_for_other_slots_is_refused(step: Any) -> None:
    routing = route_tokens([0, 1, None], num_slots=3)

    with pytest.raises(KernelArgumentError, match="routing is for 3 slots, weights have 2"):
        apply_lora_(step.y, step.x, step.weights, routing)


def test_tensors_on_another_device_are_refused(step: Any) -> None:
    elsewhere = route_tokens([0, 1, None], num_slots=2, device="meta")

    with pytest.raises(KernelArgumentError, match="routing is on meta"):
        apply_lora_(step.y, step.x, step.weights, elsewhere)
    with pytest.raises(KernelArgumentError, match="x is on meta"):
        apply_lora_(step.y, step.x.to("meta"), step.weights, step.routing)


def test_a_buffer_of_another_shape_or_dtype_is_refused(step: Any) -> None:
    with pytest.raises(UnsupportedShapeError, match=r"v is \[1, 3, 64\], expected \[1, 2, 64\]"):
        expand_(step.y, torch.zeros(1, 3, 64), step.weights, step.routing)
    with pytest.raises(KernelArgumentError, match=r"v is torch\.bfloat16, expected float32"):
        expand_(step.y, torch.zeros(1, 2, 64, dtype=torch.bfloat16), step.weights, step.routing)
