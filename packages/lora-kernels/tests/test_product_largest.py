"""The largest output of a packed product: against float64, and against the outputs themselves."""

from __future__ import annotations

import pytest
import torch

from lora_kernels import UnsupportedShapeError
from lora_kernels._native.kernels import native_kernels
from lora_kernels.native import PackedProduct, why_not_native

IN = 96

pytestmark = pytest.mark.skipif(
    why_not_native() is not None or not native_kernels().has_product,
    reason="this machine has no compiler or no AMX tiles",
)


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def first_largest(outputs: torch.Tensor) -> list[int]:
    """The first place of each row's largest number."""
    return [int((row == row.max()).nonzero()[0]) for row in outputs]


@pytest.mark.parametrize("num_rows", [0, 1, 5, 16, 17, 40, 64, 300])
@pytest.mark.parametrize("num_out", [16, 48, 4112])
@pytest.mark.parametrize("has_bias", [False, True])
def test_finds_what_is_the_largest_of_the_outputs(
    num_rows: int, num_out: int, has_bias: bool
) -> None:
    weight, x = numbers(num_out, IN, seed=1), numbers(num_rows, IN, seed=2)
    bias = numbers(num_out, seed=3) * 5 if has_bias else None
    product = PackedProduct(weight, bias)

    places, are_finite = product.largest(x)

    assert are_finite
    assert places == first_largest(product(x))
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for row, place in zip(exact, places, strict=True):
        assert row[place] >= row.max() - 2**-7 * row.abs().max()


def test_takes_the_first_of_equal_ones_wherever_threads_share_the_outputs() -> None:
    weight = numbers(16, IN, seed=1).repeat(300, 1)
    x = numbers(33, IN, seed=2)

    places, _ = PackedProduct(weight).largest(x)

    assert places == first_largest(x.float() @ weight[:16].float().T)


@pytest.mark.parametrize("sign", [1, -1])
def test_zeros_of_both_signs_are_equal(sign: int) -> None:
    weight = torch.zeros(64, IN).bfloat16()
    bias = torch.full((64,), -1.0)
    bias[[7, 20]] = torch.tensor([0.0, -0.0]) * sign
    product = PackedProduct(weight, bias)

    assert product.largest(numbers(3, IN, seed=1)) == ([7, 7, 7], True)


def test_the_least_negative_is_the_largest() -> None:
    weight = torch.zeros(64, IN).bfloat16()
    bias = -1.0 - torch.arange(64).flip(0)

    assert PackedProduct(weight, bias).largest(numbers(20, IN, seed=1)) == ([63] * 20, True)


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("num_rows", [3, 40])
@pytest.mark.parametrize("level", [1.0, -1.0])
def test_sees_what_is_not_finite(bad: float, num_rows: int, level: float) -> None:
    bias = torch.full((48,), level)
    bias[37] = bad
    product = PackedProduct(torch.zeros(48, IN).bfloat16(), bias)

    _, are_finite = product.largest(numbers(num_rows, IN, seed=1))

    assert not are_finite


def test_sees_a_row_that_is_not_finite_among_others() -> None:
    x = numbers(40, IN, seed=1)
    x[35, 4] = float("nan")

    assert not PackedProduct(numbers(48, IN, seed=2)).largest(x)[1]


def test_allows_outputs_of_no_probability_but_not_a_row_of_them() -> None:
    bias = torch.full((48,), -float("inf"))
    weight = torch.zeros(48, IN).bfloat16()

    assert not PackedProduct(weight, bias).largest(numbers(2, IN, seed=1))[1]
    bias[40] = -3.0
    assert PackedProduct(weight, bias).largest(numbers(2, IN, seed=1)) == ([40, 40], True)


def test_reads_rows_that_are_not_side_by_side() -> None:
    weight, wide = numbers(48, IN, seed=1), numbers(20, 2 * IN, seed=2)
    product = PackedProduct(weight)

    assert product.largest(wide[:, :IN]) == product.largest(wide[:, :IN].contiguous())


def test_refuses_other_widths_and_dtypes() -> None:
    product = PackedProduct(numbers(48, IN, seed=1))

    with pytest.raises(UnsupportedShapeError, match="expected"):
        product.largest(numbers(2, IN + 32, seed=2))
    with pytest.raises(UnsupportedShapeError, match="expected"):
        product.largest(torch.zeros(2, IN))
