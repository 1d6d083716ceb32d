"""Packed members: one product for all, right in any order, and never a stale slice."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lora_layers import LoraModelConfig, LoraModelManager
from lora_layers.content import SlotContent, make_prepared
from lora_layers.testing import runs
from lora_layers.wrappers import PackedMember

if TYPE_CHECKING:
    from collections.abc import Sequence

IN = 12
WIDTHS = {"q_proj": 16, "k_proj": 8, "v_proj": 4}
NAMES = tuple(WIDTHS)
PACKED = {"qkv_proj": NAMES}
PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.linear.")


class CountProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += str(func).startswith(PRODUCTS)
        return func(*args, **(kwargs or {}))


def make_block(biases: Sequence[str] = ("k_proj",), **others: nn.Module) -> nn.ModuleDict:
    """Return q, k and v side by side, those named in `biases` with one."""
    torch.manual_seed(0)
    linears = {name: nn.Linear(IN, width, name in biases) for name, width in WIDTHS.items()}
    return nn.ModuleDict({**linears, **others})


def make_pairs(seed: int, names: Sequence[str] = NAMES) -> dict[str, tuple[Tensor, Tensor]]:
    """Return random pairs of unequal rank."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for index, name in enumerate(names):
        rank = 2 + index
        lora_a = torch.randn(rank, IN, generator=generator)
        pairs[name] = lora_a, torch.randn(WIDTHS[name], rank, generator=generator)
    return pairs


def manage(block: nn.ModuleDict, *, prepack: bool = False) -> LoraModelManager:
    """Wrap a block and activate adapter `a` on q and v, `b` on all three."""
    config = LoraModelConfig(
        max_loras=3, max_lora_rank=8, packed_modules=PACKED, prepack_linear=prepack
    )
    manager = LoraModelManager(block, config)
    for key, seed, names in (("a", 1, ("q_proj", "v_proj")), ("b", 2, NAMES)):
        pairs = make_pairs(seed, names)
        content = SlotContent(slices=tuple(pairs.get(name) for name in NAMES))
        manager.register(key, make_prepared({"qkv_proj": content}))
        manager.activate(key)
    return manager


def dense(
    state: dict[str, Tensor], name: str, x: Tensor, pairs: dict[str, tuple[Tensor, Tensor]]
) -> Tensor:
    """Return one member's float64 output with merged weights."""
    weight = state[f"{name}.weight"].double()
    if name in pairs:
        lora_a, lora_b = pairs[name]
        weight = weight + lora_b.double() @ lora_a.double()
    y = x.double() @ weight.t()
    return y + state[f"{name}.bias"].double() if f"{name}.bias" in state else y


def check(y: Tensor, expected: Tensor) -> None:
    """Compare within float32's tolerance."""
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-5)


def copy_state(block: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters."""
    return {name: value.clone() for name, value in block.state_dict().items()}


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)))
def test_every_order_of_calls_gives_each_member_its_own_product(order: tuple[str, ...]) -> None:
    block = make_block()
    state = copy_state(block)
    manager = manage(block)
    manager.set_routing(runs((2, "a"), (1, None), (2, "b")), ())
    x = torch.randn(1, 5, IN)

    outputs = {name: block[name](x) for name in order}

    a, b = make_pairs(1, ("q_proj", "v_proj")), make_pairs(2)
    for name, y in outputs.items():
        assert y.shape == (1, 5, WIDTHS[name])
        check(y[0, :2], dense(state, name, x[0, :2], a))
        check(y[0, 2:3], dense(state, name, x[0, 2:3], {}))
        check(y[0, 3:], dense(state, name, x[0, 3:], b))


def test_the_members_share_one_matrix_product() -> None:
    block = make_block()
    manager = manage(block)
    manager.set_routing(runs((4, None)), ())
    x = torch.randn(4, IN)

    with CountProducts() as counter:
        for name in NAMES:
            block[name](x)

    assert counter.count == 1


def test_a_member_called_alone_and_twice_is_right_each_time() -> None:
    block = make_block()
    state = copy_state(block)
    manager = manage(block)
    manager.set_routing(runs((4, "b")), ())
    x = torch.randn(4, IN)

    first, second = block["k_proj"](x), block["k_proj"](x)

    check(first, dense(state, "k_proj", x, make_pairs(2)))
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


def test_another_input_of_the_same_shape_is_computed_anew() -> None:
    block = make_block()
    state = copy_state(block)
    manager = manage(block)
    manager.set_routing(runs((4, "b")), ())
    x, other = torch.randn(4, IN), torch.randn(4, IN)

    block["q_proj"](x)
    y = block["k_proj"](other)

    check(y, dense(state, "k_proj", other, make_pairs(2)))


def test_an_input_written_in_place_between_two_members_is_computed_anew() -> None:
    block = make_block()
    state = copy_state(block)
    manager = manage(block)
    manager.set_routing(runs((4, "b")), ())
    x = torch.randn(4, IN)

    block["q_proj"](x)
    x.mul_(3)
    y = block["k_proj"](x)

    check(y, dense(state, "k_proj", x, make_pairs(2)))


def test_a_freed_input_whose_memory_is_taken_again_is_never_mistaken_for_the_new_one() -> None:
    block = make_block()
    state = copy_state(block)
    manager = manage(block)
    manager.set_routing(runs((4, "b")), ())

    for seed in range(20):
        x = torch.randn(4, IN, generator=torch.Generator().manual_seed(seed))
        block["q_proj"](x)  # k and v are never called: their slices stay with the group
        expected = dense(state, "k_proj", x, make_pairs(2))
        del x
        again = torch.randn(4, IN, generator=torch.Generator().manual_seed(seed + 100))
        assert not torch.allclose(block["k_proj"](again).double(), expected)


def test_a_new_routing_drops_slices_computed_under_the_old_one() -> None:
    block = make_block()
    state = copy_state(block)
    manager = manage(block)
    x = torch.randn(4, IN)
    manager.set_routing(runs((4, "a")), ())
    block["q_proj"](x)

    manager.set_routing(runs((4, "b")), ())

    check(block["k_proj"](x), dense(state, "k_proj", x, make_pairs(2)))


def test_nothing_is_held_after_the_last_member_took_its_slice() -> None:
    block = make_block()
    manager = manage(block)
    manager.set_routing(runs((4, "b")), ())
    x = torch.randn(4, IN)

    for name in NAMES:
        block[name](x)

    member = block["q_proj"]
    assert isinstance(member, PackedMember)
    assert member.group._input is None
    assert member.group._slices == ()


def test_a_failing_call_leaves_nothing_behind() -> None:
    block = make_block()
    manager = manage(block)
    manager.set_routing(runs((4, "b")), ())
    block["q_proj"](torch.randn(4, IN))

    with pytest.raises(RuntimeError):
        block["k_proj"](torch.randn(4, IN + 1))

    member = block["k_proj"]
    assert isinstance(member, PackedMember)
    assert member.group._input is None


def test_a_slice_can_be_split_into_heads() -> None:
    block = make_block()
    manager = manage(block)
    manager.set_routing(runs((6, "b")), ())
    x = torch.randn(1, 6, IN)

    y = block["q_proj"](x)

    assert torch.equal(y.view(1, 6, -1, 4), y.contiguous().view(1, 6, 4, 4))


@pytest.mark.parametrize("biases", [(), NAMES, ("v_proj",)])
def test_biases_may_be_there_for_all_some_or_none(biases: tuple[str, ...]) -> None:
    block = make_block(biases)
    state = copy_state(block)
    manager = manage(block)
    manager.set_routing(runs((3, "a")), ())
    x = torch.randn(3, IN)

    outputs = {name: block[name](x) for name in NAMES}

    for name, y in outputs.items():
        check(y, dense(state, name, x, make_pairs(1, ("q_proj", "v_proj"))))


def test_members_become_views_of_one_weight_and_keep_their_parameters() -> None:
    block = make_block(NAMES)
    parameters = dict(block.named_parameters())
    state = copy_state(block)

    manage(block)

    member = block["q_proj"]
    assert isinstance(member, PackedMember)
    storage = member.group.weight.untyped_storage()
    assert storage.nbytes() == sum(WIDTHS.values()) * IN * 4
    for name, parameter in block.named_parameters():
        assert parameter is parameters[name]
        assert torch.equal(parameter, state[name])
        if name.endswith("weight"):
            assert parameter.untyped_storage().data_ptr() == storage.data_ptr()


def test_weights_loaded_through_the_old_keys_reach_the_fused_product() -> None:
    block, other = make_block(NAMES), make_block(NAMES)
    for value in other.state_dict().values():
        value.add_(1)
    manager = manage(block)
    manager.set_routing(runs((3, None)), ())
    x = torch.randn(3, IN)

    block.load_state_dict(other.state_dict())

    for name in NAMES:
        torch.testing.assert_close(block[name](x), other[name](x))


def test_unwrapping_gives_members_storages_of_their_own_and_the_same_bits() -> None:
    block = make_block(NAMES)
    state = copy_state(block)
    modules = dict(block.items())
    manager = manage(block)

    manager.unwrap()

    assert all(block[name] is modules[name] for name in NAMES)
    assert all(torch.equal(value, state[name]) for name, value in block.state_dict().items())
    storages = {p.untyped_storage().data_ptr() for p in block.parameters()}
    assert len(storages) == 2 * len(NAMES)


class Unusual(nn.Linear):
    """A linear module of another class."""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"k_proj": None}, "no linear module named k_proj"),
        ({"k_proj": Unusual(IN, 8)}, "k_proj is a Unusual, expected a plain nn.Linear"),
        ({"k_proj": nn.Linear(IN + 1, 8)}, "different in_features"),
        ({"k_proj": nn.Linear(IN, 8).bfloat16()}, "different dtypes"),
    ],
)
def test_a_group_that_cannot_run_as_one_is_wrapped_separately_and_reported(
    change: dict[str, nn.Module | None], reason: str
) -> None:
    block = make_block()
    for name, module in change.items():
        if module is None:
            del block[name]
        else:
            block[name] = module

    manager = LoraModelManager(block, LoraModelConfig(packed_modules=PACKED))

    assert reason in manager.report.unpacked["qkv_proj"]
    assert not manager.report.packed
    assert set(manager.shapes) == set(block.keys())


def test_members_that_share_a_weight_or_a_module_stay_separate() -> None:
    shared = make_block()
    shared["k_proj"] = shared["q_proj"]
    tied = make_block()
    tied["k_proj"] = nn.Linear(IN, 16)
    tied["k_proj"].weight = tied["q_proj"].weight

    reasons = [
        LoraModelManager(block, LoraModelConfig(packed_modules=PACKED)).report.unpacked["qkv_proj"]
        for block in (shared, tied)
    ]

    assert reasons == ["members share a weight", "members share a weight"]


def test_a_member_with_hooks_keeps_them_by_staying_separate() -> None:
    block = make_block()
    seen: list[str] = []
    block["q_proj"].register_forward_hook(lambda *_: seen.append("q"))
    manager = LoraModelManager(block, LoraModelConfig(packed_modules=PACKED))
    manager.set_routing(runs((2, None)), ())

    block["q_proj"](torch.randn(2, IN))

    assert seen == ["q"]
    assert "qkv_proj" in manager.report.unpacked
