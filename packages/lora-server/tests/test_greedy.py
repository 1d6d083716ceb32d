"""The largest logit of each row, against float64 arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lora_kernels.native import why_not_native
from lora_server.model.greedy import Largest
from lora_server.model.greedy import find_largest as find_largest_with
from lora_server.model.native.kernels import LayerKernels, load_layer_kernels

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def find_largest(logits: torch.Tensor) -> Largest:
    """Find the largest without native kernels and, where there are any, with them."""
    found = find_largest_with(logits)
    kernels = native_kernels(logits.dtype)
    if kernels is not None:
        native = find_largest_with(logits, kernels)
        assert native.is_finite == found.is_finite
        assert native.token_ids == found.token_ids or not found.is_finite
    return found


def native_kernels(dtype: torch.dtype) -> LayerKernels | None:
    return load_layer_kernels(dtype) if why_not_native() is None else None


def first_largest(logits: torch.Tensor) -> list[int]:
    """Return numpy's answer over exact values."""
    return np.asarray(logits.double()).argmax(axis=1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0.0, 50.0, -50.0])
@pytest.mark.parametrize("width", [301, 4096])
def test_finds_the_first_of_the_largest(dtype: torch.dtype, shift: float, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(7, width, generator=generator) + shift).to(dtype)

    found = find_largest(logits)

    assert found.token_ids == first_largest(logits)
    assert found.is_finite


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "row", [[0.0, -0.0, 0.0], [-0.0, 0.0, -1.0], [-2.0, -1.0, -1.0], [3, 5, 5]]
)
def test_takes_zeros_of_both_signs_as_equal(dtype: torch.dtype, row: list[float]) -> None:
    rows = [[*start, *[-9.0] * (64 - len(start))] for start in (row, [1.0, 2.0, 3.0])]
    logits = torch.tensor(rows * 3, dtype=dtype)  # four side by side, and two alone

    assert find_largest(logits).token_ids == first_largest(logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("others", [1.0, -1.0])
@pytest.mark.parametrize("place", [(1, 37), (5, 37)])
@pytest.mark.parametrize("width", [40, 64])
def test_sees_what_is_not_finite(
    dtype: torch.dtype, bad: float, others: float, place: tuple[int, int], width: int
) -> None:
    logits = torch.full((6, width), others, dtype=dtype)
    logits[place] = bad

    assert not find_largest(logits).is_finite


@pytest.mark.parametrize("dtype", DTYPES)
def test_allows_tokens_of_no_probability(dtype: torch.dtype) -> None:
    logits = torch.full((6, 64), -float("inf"), dtype=dtype)
    logits[:, 3] = 1.0
    logits[1::2, 3] = -1.0

    assert find_largest(logits) == ([3] * 6, True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [1, 5])
def test_refuses_a_row_without_any_probability(dtype: torch.dtype, row: int) -> None:
    logits = torch.ones(6, 64, dtype=dtype)
    logits[row] = -float("inf")

    assert not find_largest(logits).is_finite


def test_reads_rows_that_are_not_side_by_side() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(50, 6, generator=generator).bfloat16().T

    assert find_largest(logits).token_ids == first_largest(logits)
