"""Wrappers take the base modules' places without a trace, one a module, and go again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lora_layers import LoraModelConfig, LoraModelManager
from lora_layers.testing import LINEARS, PACKED_MODULES, BuiltAdapter, TinyDecoder, runs
from lora_layers.wrappers import LoraLinear

PACKED = LoraModelConfig(packed_modules=PACKED_MODULES)


def test_keys_parameters_and_attributes_are_those_of_the_base() -> None:
    model = TinyDecoder()
    keys = list(model.state_dict())
    parameters = dict(model.named_parameters())

    LoraModelManager(model, PACKED)

    assert list(model.state_dict()) == keys
    assert list(dict(model.named_parameters())) == list(parameters)
    assert all(value is parameters[name] for name, value in model.named_parameters())
    assert model.lm_head.in_features == 16
    assert model.embed_tokens.num_embeddings == 32
    assert model.lm_head.weight.dtype is torch.float32
    with pytest.raises(AttributeError, match="no_such_thing"):
        model.lm_head.no_such_thing  # noqa: B018


def test_weights_load_through_the_wrappers() -> None:
    model, other = TinyDecoder(seed=1), TinyDecoder(seed=2)
    ids = torch.arange(7)
    LoraModelManager(model, PACKED)

    model.load_state_dict(other.state_dict())

    torch.testing.assert_close(model(ids), other(ids))


def test_a_module_under_two_paths_gets_one_wrapper_registered_once() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"first": shared, "second": nn.ModuleDict({"inner": shared})})

    manager = LoraModelManager(model, LoraModelConfig())

    assert list(manager.shapes) == ["first"]
    assert isinstance(model["first"], LoraLinear)
    assert model["first"] is model.get_submodule("second.inner")
    assert manager.report.aliases == {"second.inner": "first"}


def test_a_block_under_two_paths_is_packed_once() -> None:
    block = TinyDecoder().layers[0]
    model = nn.ModuleList([block, block])

    manager = LoraModelManager(model, PACKED)

    assert set(manager.report.packed) == {"0.attn.qkv_proj", "0.mlp.gate_up_proj"}
    assert not manager.report.unpacked


def test_a_head_that_is_another_module_too_gets_a_wrapper_of_its_own() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"proj": shared, "lm_head": shared})

    manager = LoraModelManager(model, LoraModelConfig())

    assert list(manager.shapes) == ["proj", "lm_head"]
    assert model["proj"] is not model["lm_head"]
    assert model["proj"].weight is model["lm_head"].weight


def test_which_modules_see_logits_rows_is_the_callers_to_say() -> None:
    model = nn.ModuleDict({"embed_out": nn.Linear(4, 4), "lm_head": nn.Linear(4, 4)})

    manager = LoraModelManager(model, LoraModelConfig(logits_modules=frozenset({"embed_out"})))

    stacks = manager._injection.stacks
    assert stacks["embed_out"].cell is manager._step.logits
    assert stacks["lm_head"].cell is manager._step.tokens


def test_unwrapping_restores_the_very_modules_and_bit_identical_outputs() -> None:
    model = TinyDecoder(tied=True)
    ids = torch.arange(11)
    base = model(ids)
    modules = dict(model.named_modules())
    manager = LoraModelManager(model, PACKED)

    returned = manager.unwrap()

    assert returned is model
    assert dict(model.named_modules()) == modules
    assert all(module is modules[name] for name, module in model.named_modules())
    assert torch.equal(model(ids), base)
    assert model.lm_head.weight is model.embed_tokens.weight


def test_unwrapping_with_active_adapters_restores_the_base(
    manager: LoraModelManager, model: TinyDecoder, sql: BuiltAdapter
) -> None:
    ids = torch.arange(11)
    base = TinyDecoder()(ids)
    manager.register("sql", manager.prepare(sql.adapter))
    manager.activate("sql")
    manager.set_routing(runs((11, "sql")), runs((11, "sql")))
    assert not torch.allclose(model(ids), base)

    manager.unwrap()

    assert torch.equal(model(ids), base)
    assert manager.stats().slots_used == 0
    assert manager.buffer_bytes == 0


def test_a_model_can_be_wrapped_again_after_unwrapping() -> None:
    model = TinyDecoder()
    LoraModelManager(model, PACKED).unwrap()

    again = LoraModelManager(model, PACKED)

    assert set(again.shapes) == {*LINEARS, "embed_tokens"}


def test_switching_to_evaluation_reaches_the_base_modules() -> None:
    model = nn.ModuleDict({"proj": nn.Linear(4, 4)}).train()
    LoraModelManager(model, LoraModelConfig())

    model.eval()

    wrapper = model["proj"]
    assert isinstance(wrapper, LoraLinear)
    assert not wrapper.training
    assert not wrapper.base_layer.training
    assert "Linear(in_features=4" in repr(wrapper)


def test_slots_have_the_dtype_of_the_base_or_the_one_asked_for() -> None:
    config = LoraModelConfig(lora_dtype=torch.bfloat16)

    own = LoraModelManager(TinyDecoder(), LoraModelConfig())
    asked = LoraModelManager(TinyDecoder(), config)

    assert {s.dtype for s in own._injection.stacks.values()} == {torch.float32}
    assert {s.dtype for s in asked._injection.stacks.values()} == {torch.bfloat16}
