"""Recognising linear modules, and the prepacked product of bfloat16 on CPUs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lora_layers import LoraModelConfig, LoraModelManager
from lora_layers.testing import PACKED_MODULES, TinyDecoder, runs
from lora_layers.wrappers.base_linear import (
    MAX_PREPACKED_ROWS,
    can_prepack,
    is_conv1d_like,
    is_plain_linear,
    prepack_product,
    read_linear_shape,
    takes_one_input,
)

needs_prepacking = pytest.mark.skipif(
    not can_prepack(torch.zeros(4, 4, dtype=torch.bfloat16)),
    reason="no bfloat16 products of oneDNN on this CPU",
)


class Widths(nn.Module):
    """Has `nx`, `nf` and a weight."""

    def __init__(self, nx: int, nf: int, *shape: int) -> None:
        super().__init__()
        self.nx, self.nf = nx, nf
        self.weight = nn.Parameter(torch.zeros(shape))


def test_a_conv1d_like_module_has_widths_that_match_its_weight() -> None:
    assert is_conv1d_like(Widths(3, 5, 3, 5))
    assert not is_conv1d_like(Widths(3, 5, 5, 3))
    assert not is_conv1d_like(Widths(3, 5, 3, 5, 1))
    assert not is_conv1d_like(nn.Linear(3, 5))
    assert not is_conv1d_like(nn.LayerNorm(3))


def test_widths_are_in_then_out_however_the_weight_is_stored() -> None:
    for module in (nn.Linear(3, 5), Widths(3, 5, 3, 5)):
        shape = read_linear_shape(module)
        assert shape is not None
        assert (shape.in_features, shape.out_features) == (3, 5)
    assert read_linear_shape(nn.Embedding(3, 5)) is None


def test_a_linear_with_hooks_or_of_a_subclass_is_not_plain() -> None:
    hooked = nn.Linear(3, 5)
    hooked.register_forward_pre_hook(lambda *_: None)

    assert is_plain_linear(nn.Linear(3, 5))
    assert not is_plain_linear(hooked)
    assert not is_plain_linear(nn.Bilinear(3, 5, 2))


def test_inputs_of_a_forward_are_counted() -> None:
    assert takes_one_input(nn.Linear(3, 5))
    assert not takes_one_input(nn.Bilinear(3, 5, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_not_prepacked(dtype: torch.dtype) -> None:
    assert prepack_product(torch.zeros(4, 4, dtype=dtype), None) is None


@needs_prepacking
@pytest.mark.parametrize("rows", [1, 7, MAX_PREPACKED_ROWS, MAX_PREPACKED_ROWS + 1])
@pytest.mark.parametrize("biased", [True, False])
def test_a_prepacked_product_equals_the_plain_one(rows: int, *, biased: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 32).bfloat16()
    bias = torch.randn(48).bfloat16() if biased else None
    x = torch.randn(1, rows, 32).bfloat16()
    product = prepack_product(weight, bias)
    assert product is not None

    y = product(x)

    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert y.shape == (1, rows, 48)
    torch.testing.assert_close(y.double(), exact, atol=3e-2, rtol=2e-2)


@needs_prepacking
def test_a_prepacked_model_answers_as_before_and_unwraps_to_the_same_bits() -> None:
    model = TinyDecoder().bfloat16()
    ids = torch.arange(9)
    base: Tensor = model(ids)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    config = LoraModelConfig(packed_modules=PACKED_MODULES, prepack_linear=True)

    manager = LoraModelManager(model, config)
    manager.set_routing(runs((9, None)), runs((9, None)))
    wrapped: Tensor = model(ids)
    held = {name: value.clone() for name, value in model.state_dict().items()}
    manager.unwrap()

    torch.testing.assert_close(wrapped, base, atol=3e-2, rtol=2e-2)
    assert torch.equal(model(ids), base)
    for found in (held, model.state_dict()):
        assert list(found) == list(state)
        assert all(torch.equal(found[name], value) for name, value in state.items())
