"""Which modules carry LoRA: the filter's names, what cannot be wrapped, what matched nothing."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from lora_layers import (
    LoraModelConfig,
    LoraModelManager,
    TargetNotFoundError,
    UnsupportedModuleError,
)
from lora_layers.targets import TargetFilter
from lora_layers.testing import EMBEDDINGS, LINEARS, PACKED_MODULES, TinyDecoder


@pytest.mark.parametrize(
    ("listed", "path", "passes"),
    [
        (None, "layers.0.attn.q_proj", True),
        (["q_proj"], "layers.0.attn.q_proj", True),
        (["layers.0.attn.q_proj"], "layers.0.attn.q_proj", True),
        (["layers.1.attn.q_proj"], "layers.0.attn.q_proj", False),
        (["attn.q_proj"], "layers.0.attn.q_proj", False),
        (["qkv_proj"], "layers.0.attn.k_proj", True),
        (["layers.0.attn.qkv_proj"], "layers.0.attn.k_proj", True),
        (["layers.1.attn.qkv_proj"], "layers.0.attn.k_proj", False),
        (["q_proj"], "layers.0.attn.k_proj", False),
        (["o_proj"], "lm_head", False),
        ([], "layers.0.attn.q_proj", False),
    ],
)
def test_a_module_passes_by_last_part_full_path_or_packed_name(
    listed: list[str] | None, path: str, *, passes: bool
) -> None:
    target_filter = TargetFilter(None if listed is None else frozenset(listed), PACKED_MODULES)

    assert target_filter.passes(path) is passes


def test_without_a_filter_every_linear_and_embedding_is_wrapped() -> None:
    manager = LoraModelManager(TinyDecoder(), LoraModelConfig(packed_modules=PACKED_MODULES))

    assert set(manager.shapes) == {*LINEARS, *EMBEDDINGS}


def test_a_packed_group_passes_by_one_member_and_only_that_member_carries_lora() -> None:
    config = LoraModelConfig(target_modules=frozenset({"q_proj"}), packed_modules=PACKED_MODULES)

    manager = LoraModelManager(TinyDecoder(), config)

    assert set(manager.shapes) == {"layers.0.attn.q_proj", "layers.1.attn.q_proj"}
    assert "layers.0.attn.qkv_proj" in manager.report.packed
    assert "layers.0.attn.k_proj" in manager.report.left_out


def test_the_empty_filter_wraps_nothing_and_leaves_the_model_as_it_is() -> None:
    model = TinyDecoder()
    ids = torch.arange(5)
    base = model(ids)

    manager = LoraModelManager(model, LoraModelConfig(target_modules=frozenset()))

    assert not manager.shapes
    assert torch.equal(model(ids), base)


def test_a_filter_entry_that_cannot_carry_lora_is_refused_by_name() -> None:
    model = nn.ModuleDict({"proj": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})

    with pytest.raises(UnsupportedModuleError, match="norm is a LayerNorm") as caught:
        LoraModelManager(model, LoraModelConfig(target_modules=frozenset({"norm", "proj"})))

    assert list(caught.value.modules) == ["norm"]
    assert isinstance(model["proj"], nn.Linear)


def test_a_filter_entry_that_matches_nothing_is_refused_by_name() -> None:
    config = LoraModelConfig(target_modules=frozenset({"q_proj", "w_pack"}))

    with pytest.raises(TargetNotFoundError, match="w_pack"):
        LoraModelManager(TinyDecoder(), config)


def test_a_model_with_nothing_to_wrap_is_refused_with_the_classes_seen() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Conv1d(4, 4, 1))

    with pytest.raises(TargetNotFoundError, match="Conv1d, LayerNorm"):
        LoraModelManager(model, LoraModelConfig())


def test_without_a_filter_one_warning_names_matrices_that_stay_unwrapped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Conv1d(4, 4, 1), "n": nn.LayerNorm(4)})

    with caplog.at_level(logging.WARNING):
        manager = LoraModelManager(model, LoraModelConfig())

    assert [r.getMessage() for r in caplog.records] == [
        "modules with weight matrices that cannot carry LoRA: 1 Conv1d"
    ]
    assert set(manager.report.unsupported) == {"b", "n"}


def test_children_whose_parent_reads_their_weight_are_not_wrapped() -> None:
    model = nn.ModuleDict({"mha": nn.MultiheadAttention(4, 2), "proj": nn.Linear(4, 4)})

    manager = LoraModelManager(model, LoraModelConfig())

    assert set(manager.shapes) == {"proj"}
    assert "by weight, not by call" in manager.report.unsupported["mha.out_proj"]


class OffsetPositions(nn.Embedding):
    """Derives its ids from more than one input, as position embeddings of some models do."""

    def forward(self, mask: Tensor, offset: int) -> Tensor:  # type: ignore[override]
        """Look up positions counted from `offset`."""
        return super().forward(torch.arange(mask.shape[-1]) + offset)


def test_a_module_whose_forward_takes_several_inputs_is_not_wrapped() -> None:
    model = nn.ModuleDict({"positions": OffsetPositions(8, 4), "proj": nn.Linear(4, 4)})

    manager = LoraModelManager(model, LoraModelConfig())

    assert set(manager.shapes) == {"proj"}
    assert "several inputs" in manager.report.unsupported["positions"]
