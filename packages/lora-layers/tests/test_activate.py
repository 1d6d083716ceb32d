"""Writing an adapter into a slot: every module set or reset, all of it or nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from lora_kernels import UnsupportedShapeError
from lora_layers.content import SlotContent, make_prepared
from lora_layers.testing import BuiltAdapter, TinyDecoder, dense_logits, runs, stack_of

if TYPE_CHECKING:
    from lora_layers import LoraModelManager, PreparedAdapter

IDS = torch.arange(6)


def slot_content(manager: LoraModelManager, slot: int) -> dict[str, torch.Tensor]:
    """Return copies of all A and B of a slot."""
    return {
        f"{path} {kind}{index}": tensor[slot].clone()
        for path in manager._injection.stacks
        for weights in [stack_of(manager, path).weights]
        for kind, tensors in (("A", weights.lora_a), ("B", weights.lora_b))
        for index, tensor in enumerate(tensors)
    }


def is_zero(manager: LoraModelManager, slot: int) -> bool:
    """Whether a slot holds nothing but zeros in every module."""
    return not any(bool(tensor.any()) for tensor in slot_content(manager, slot).values())


def broken(prepared: PreparedAdapter) -> PreparedAdapter:
    """Return an adapter whose last module does not fit, past all checks of `prepare`."""
    bad = (torch.ones(4, 16), torch.ones(31, 4))
    content = SlotContent(slices=(bad,))
    return replace(prepared, contents={**prepared.contents, "lm_head": content})


def test_modules_the_next_adapter_does_not_touch_are_reset(
    manager: LoraModelManager, model: TinyDecoder, sql: BuiltAdapter, chat: BuiltAdapter
) -> None:
    for key, built in (("sql", sql), ("chat", chat)):
        manager.register(key, manager.prepare(built.adapter))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    manager.activate("sql")
    manager.deactivate("sql")

    manager.activate("chat")

    assert manager.slot_of("chat") == 0
    manager.set_routing(runs((6, "chat")), runs((6, "chat")))
    expected = dense_logits(state, IDS, (chat, 1.0))
    torch.testing.assert_close(model(IDS).double(), expected, atol=1e-4, rtol=1e-4)
    touched = {"layers.0.attn.qkv_proj", "layers.1.mlp.down_proj"}
    for name, tensor in slot_content(manager, 0).items():
        assert bool(tensor.any()) == (name.split()[0] in touched and not name.endswith(("1", "2")))


def test_a_smaller_rank_leaves_no_rows_of_the_larger_one(manager: LoraModelManager) -> None:
    for key, rank in (("large", 8), ("small", 2)):
        pair = torch.ones(rank, 16), torch.ones(32, rank)
        manager.register(key, make_prepared({"lm_head": SlotContent(slices=(pair,))}))
    manager.activate("large")
    manager.deactivate("large")

    manager.activate("small")

    weights = stack_of(manager, "lm_head").weights
    assert weights.slot_ranks[0] == (2,)
    assert not weights.lora_a[0][0, 2:].any()
    assert not weights.lora_b[0][0, :, 2:].any()


def test_a_failure_in_one_module_leaves_the_slot_zero_and_the_others_as_they_were(
    manager: LoraModelManager, sql: BuiltAdapter
) -> None:
    prepared = manager.prepare(sql.adapter)
    manager.register("good", prepared)
    manager.register("bad", broken(prepared))
    manager.activate("good")
    before = slot_content(manager, 0)

    with pytest.raises(UnsupportedShapeError):
        manager.activate("bad")

    assert manager.slot_of("bad") is None
    assert manager.stats().slots_used == 1
    assert is_zero(manager, 1)
    after = slot_content(manager, 0)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_slot_that_failed_can_be_used_again(
    manager: LoraModelManager, model: TinyDecoder, sql: BuiltAdapter
) -> None:
    prepared = manager.prepare(sql.adapter)
    manager.register("bad", broken(prepared))
    with pytest.raises(UnsupportedShapeError):
        manager.activate("bad")
    manager.remove("bad")
    state = {name: value.clone() for name, value in model.state_dict().items()}

    manager.register("good", prepared)
    manager.activate("good")

    manager.set_routing(runs((6, "good")), runs((6, "good")))
    expected = dense_logits(state, IDS, (sql, 1.0))
    torch.testing.assert_close(model(IDS).double(), expected, atol=1e-4, rtol=1e-4)


def test_removing_zeroes_the_slot(manager: LoraModelManager, sql: BuiltAdapter) -> None:
    manager.register("sql", manager.prepare(sql.adapter))
    manager.activate("sql")
    assert not is_zero(manager, 0)

    manager.remove("sql")

    assert is_zero(manager, 0)
    assert all(stack.is_idle for stack in manager._injection.stacks.values())
