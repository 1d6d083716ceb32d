"""Norms of updates against the full product in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_weights import LoraPair, ModulePart, PartKind
from lora_weights.norms import part_norms, product_norm


@given(st.integers(1, 9), st.integers(1, 17), st.integers(1, 13), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_the_norm_is_that_of_the_full_product(r: int, i: int, o: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn((r, i), generator=generator), torch.randn((o, r), generator=generator)

    exact = float(torch.linalg.matrix_norm(b.double() @ a.double()))

    assert math.isclose(product_norm(a, b), exact, rel_tol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_types_are_widened_first(dtype: torch.dtype) -> None:
    a, b = torch.full((4, 8), 200.0, dtype=dtype), torch.full((8, 4), 200.0, dtype=dtype)

    assert product_norm(a, b) == 8 * 4 * 200.0 * 200.0


def test_a_product_that_vanishes_has_the_norm_zero() -> None:
    a, b = torch.tensor([[1.0], [-1.0]]), torch.tensor([[0.1, 0.1]])

    assert product_norm(a, b) == 0.0


def test_each_kind_that_an_adapter_can_tell_has_its_norm() -> None:
    part = ModulePart(
        pair=LoraPair(lora_a=torch.ones(1, 4), lora_b=torch.ones(9, 1)),
        lora_bias=torch.full((9,), 2.0),
        bias=torch.ones(9),
        magnitude=torch.ones(9),
    )

    assert part_norms(part) == {PartKind.PAIR: 6.0, PartKind.LORA_BIAS: 6.0}
    assert part_norms(ModulePart(gain=torch.tensor([1.0, 4.0, 5.0]))) == {PartKind.GAIN: 5.0}
    assert part_norms(ModulePart(bias=torch.ones(9))) == {}


def test_products_below_each_other_have_one_norm_together() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(5, 2, 7), torch.randn(5, 6, 2)

    exact = float((b.double() @ a.double()).square().sum().sqrt())
    shared = float((b.double() @ a[:1].double()).square().sum().sqrt())

    assert math.isclose(product_norm(a, b), exact, rel_tol=1e-9)
    assert math.isclose(product_norm(a[:1], b), shared, rel_tol=1e-9)
