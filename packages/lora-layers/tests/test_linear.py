"""One linear module with slots: equals merged weights in float64, in every shape and form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lora_kernels import Backend
from lora_layers import (
    InferenceOnlyError,
    LoraModelConfig,
    LoraModelManager,
    PreparedAdapter,
    RoutingNotSetError,
)
from lora_layers.content import SlotContent, make_prepared
from lora_layers.testing import runs
from lora_weights import ModuleShape

IN, OUT, RANK = 12, 20, 5


class Transposed(nn.Module):
    """A linear module in GPT-2's form: weight `[I, O]`, widths `nx` and `nf`."""

    def __init__(self) -> None:
        super().__init__()
        self.nx, self.nf = IN, OUT
        self.weight = nn.Parameter(torch.randn(IN, OUT))
        self.bias = nn.Parameter(torch.randn(OUT))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., I]` to `[..., O]`."""
        return torch.addmm(self.bias, x.view(-1, IN), self.weight).view(*x.shape[:-1], OUT)


class Doubling(nn.Linear):
    """A linear module with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Return twice the product."""
        return 2 * super().forward(x)


def make_pair(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return random A `[R, I]` and B `[O, R]`."""
    generator = torch.Generator().manual_seed(seed)
    lora_a = torch.randn(RANK, IN, generator=generator)
    return lora_a.to(dtype), torch.randn(OUT, RANK, generator=generator).to(dtype)


def prepared(pair: tuple[Tensor, Tensor]) -> PreparedAdapter:
    """Return what an adapter of the module `proj` is after preparation."""
    return make_prepared({"proj": SlotContent(slices=(pair,))})


def manage(module: nn.Module, backend: Backend = Backend.ATEN) -> LoraModelManager:
    """Wrap a module of the name `proj` and activate two adapters, `a` and `b`."""
    torch.manual_seed(0)
    config = LoraModelConfig(max_loras=3, max_lora_rank=8, backend=backend)
    manager = LoraModelManager(nn.ModuleDict({"proj": module}), config)
    dtype = module.weight.dtype
    assert isinstance(dtype, torch.dtype)
    for seed, key in enumerate(("a", "b")):
        manager.register(key, prepared(make_pair(seed, dtype)))
        manager.activate(key)
    return manager


def call(manager: LoraModelManager, x: Tensor) -> Tensor:
    """Run the wrapped module."""
    result = manager.model.get_submodule("proj")(x)
    assert isinstance(result, Tensor)
    return result


def dense(weight: Tensor, bias: Tensor | None, x: Tensor, seed: int | None) -> Tensor:
    """Return the float64 product with merged weights; `weight` is `[O, I]`."""
    merged = weight.double()
    if seed is not None:
        lora_a, lora_b = make_pair(seed, weight.dtype)
        merged = merged + lora_b.double() @ lora_a.double()
    y = x.double() @ merged.t()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.ATEN])
@pytest.mark.parametrize("shape", [(6, IN), (1, 6, IN), (2, 3, IN)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_mixed_batch_equals_merged_weights_row_by_row(
    shape: tuple[int, ...], backend: Backend, *, bias: bool
) -> None:
    module = nn.Linear(IN, OUT, bias=bias)
    manager = manage(module, backend)
    x = torch.randn(shape)
    manager.set_routing(runs((2, "a"), (1, None), (3, "b")), ())

    y = call(manager, x)

    rows = x.reshape(6, IN)
    expected = [
        dense(module.weight, module.bias, rows[:2], 0),
        dense(module.weight, module.bias, rows[2:3], None),
        dense(module.weight, module.bias, rows[3:], 1),
    ]
    assert y.shape == (*shape[:-1], OUT)
    torch.testing.assert_close(
        y.reshape(6, OUT).double(), torch.cat(expected), atol=1e-4, rtol=1e-5
    )


def test_a_transposed_linear_module_is_adapted_in_the_same_form() -> None:
    module = Transposed()
    manager = manage(module)
    x = torch.randn(1, 4, IN)
    manager.set_routing(runs((4, "b")), ())

    y = call(manager, x)

    expected = dense(module.weight.t(), module.bias, x[0], 1)
    shape = manager.shapes["proj"]
    assert isinstance(shape, ModuleShape)
    assert shape.in_features == IN
    torch.testing.assert_close(y[0].double(), expected, atol=1e-4, rtol=1e-5)


def test_a_subclass_keeps_its_own_forward_and_gets_the_delta_added() -> None:
    module = Doubling(IN, OUT)
    manager = manage(module)
    x = torch.randn(3, IN)
    manager.set_routing(runs((3, "a")), ())

    y = call(manager, x)

    delta = dense(module.weight, None, x, 0) - dense(module.weight, None, x, None)
    expected = 2 * dense(module.weight, module.bias, x, None) + delta
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-5)


def test_hooks_of_the_base_module_still_run() -> None:
    module = nn.Linear(IN, OUT)
    seen: list[tuple[int, ...]] = []
    module.register_forward_hook(lambda _module, args, _y: seen.append(tuple(args[0].shape)))
    manager = manage(module)
    manager.set_routing(runs((3, "a")), ())

    call(manager, torch.randn(3, IN))

    assert seen == [(3, IN)]


def test_a_non_contiguous_input_gives_the_same_result() -> None:
    module = nn.Linear(IN, OUT)
    manager = manage(module)
    x = torch.randn(IN, 5).t()
    manager.set_routing(runs((5, "a")), ())

    y = call(manager, x)

    torch.testing.assert_close(
        y.double(), dense(module.weight, module.bias, x, 0), atol=1e-4, rtol=1e-5
    )


def test_bfloat16_stays_within_its_tolerance() -> None:
    module = nn.Linear(IN, OUT).bfloat16()
    manager = manage(module)
    x = (torch.randn(4, IN) / 8).bfloat16()  # outputs of about 1, where the tolerance is meant
    manager.set_routing(runs((4, "a")), ())

    y = call(manager, x)

    expected = dense(module.weight, module.bias, x, 0)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.double(), expected, atol=3e-2, rtol=2e-2)


def test_base_rows_are_bit_identical_to_the_unwrapped_module() -> None:
    module = nn.Linear(IN, OUT)
    manager = manage(module)
    x = torch.randn(5, IN)
    base = module(x)
    manager.set_routing(runs((2, None), (2, "a"), (1, None)), ())

    y = call(manager, x)

    assert torch.equal(y[[0, 1, 4]], base[[0, 1, 4]])
    assert not torch.equal(y[2:4], base[2:4])


def test_without_adapters_in_slots_nothing_is_added_and_no_routing_is_needed() -> None:
    module = nn.Linear(IN, OUT)
    x = torch.randn(5, IN)
    base = module(x)

    manager = LoraModelManager(nn.ModuleDict({"proj": module}), LoraModelConfig())

    assert torch.equal(call(manager, x), base)


def test_a_call_before_any_routing_is_refused_once_an_adapter_is_active() -> None:
    manager = manage(nn.Linear(IN, OUT))

    with pytest.raises(RoutingNotSetError, match="proj is called with 3 rows and no routing"):
        call(manager, torch.randn(3, IN))


def test_a_call_with_other_rows_than_the_step_has_is_refused_with_both_numbers() -> None:
    manager = manage(nn.Linear(IN, OUT))
    manager.set_routing(runs((5, "a")), ())

    with pytest.raises(RoutingNotSetError, match="3 rows and the routing has 5 rows"):
        call(manager, torch.randn(3, IN))


def test_a_call_with_gradients_is_refused_instead_of_losing_them() -> None:
    manager = manage(nn.Linear(IN, OUT))
    manager.set_routing(runs((3, "a")), ())

    with torch.enable_grad(), pytest.raises(InferenceOnlyError, match="inference_mode"):
        call(manager, torch.randn(3, IN))


def test_it_runs_in_inference_mode() -> None:
    module = nn.Linear(IN, OUT)
    manager = manage(module)
    manager.set_routing(runs((3, "a")), ())
    x = torch.randn(3, IN)

    with torch.inference_mode():
        y = call(manager, x)

    torch.testing.assert_close(
        y.double(), dense(module.weight, module.bias, x, 0), atol=1e-4, rtol=1e-5
    )
