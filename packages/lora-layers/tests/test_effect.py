"""Norms of updates are those of the dense products, and what cancels itself out has no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from lora_layers import AdapterMismatchError, LoraModelConfig, LoraModelManager
from lora_layers.content import ExpertContent, SlotContent, make_prepared
from lora_layers.effect import update_norms
from lora_layers.step import StepState
from lora_layers.testing import EMBEDDINGS, LINEARS, PACKED_MODULES, TinyDecoder, build_adapter
from lora_layers.wrappers import ExpertStack
from lora_weights import ExpertShape, load_adapter, save_adapter
from lora_weights.testing import build_raw_adapter

if TYPE_CHECKING:
    from pathlib import Path

X, R, H, F = 4, 3, 16, 8


def test_norms_equal_those_of_the_dense_updates_in_float64(tmp_path: Path) -> None:
    built = build_adapter(tmp_path, r=4)
    manager = LoraModelManager(TinyDecoder(), LoraModelConfig(packed_modules=PACKED_MODULES))

    found = manager.update_norms(manager.prepare(built.adapter))

    assert found.keys() == LINEARS.keys() | EMBEDDINGS.keys()
    for path, norm in found.items():
        dense = float(torch.linalg.matrix_norm(built.deltas[path]))
        assert norm == pytest.approx(dense, rel=1e-6)


def experts_stack() -> ExpertStack:
    """Return empty slots of a gated experts module."""
    shape = ExpertShape(
        num_experts=X,
        hidden_size=H,
        intermediate_size=F,
        is_gated=True,
        is_interleaved=False,
        is_transposed=False,
    )
    return ExpertStack(
        path="experts",
        shape=shape,
        num_slots=1,
        max_rank=R,
        dtype=torch.float32,
        device=torch.device("cpu"),
        shares_outer=False,
        cell=StepState(num_slots=1, device=torch.device("cpu")).tokens,
        backend=LoraModelConfig().backend,
    )


@pytest.mark.parametrize("experts_of_a", [1, X])
@pytest.mark.parametrize("experts_of_b", [1, X])
def test_the_norm_of_experts_is_over_all_of_them(experts_of_a: int, experts_of_b: int) -> None:
    torch.manual_seed(0)
    gate = (torch.randn(experts_of_a, R, H), torch.randn(experts_of_b, F, R))
    down = (torch.randn(X, R, F), torch.randn(X, H, R))
    prepared = make_prepared({"experts": ExpertContent(w13=(gate, None), w2=down)})

    found = update_norms(prepared, {"experts": experts_stack()})

    squares = [
        float(((b.double() @ a.double()).expand(X, -1, -1) ** 2).sum()) for a, b in (gate, down)
    ]
    assert found == {"experts": pytest.approx(sum(squares) ** 0.5, rel=1e-9)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_that_cancel_each_other_have_no_effect(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(1, H).to(dtype), torch.randn(F, 1).to(dtype)

    cancelled = SlotContent(slices=((torch.cat([a, a]), torch.cat([b, -b], dim=1)),))
    apart = torch.zeros(2, H, dtype=dtype)
    apart[0] = a
    into_nothing = SlotContent(slices=((apart, torch.cat([torch.zeros_like(b), b], dim=1)),))

    assert not cancelled.has_effect()
    assert not into_nothing.has_effect()


def test_a_product_far_smaller_than_its_factors_has_an_effect() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(1, H), torch.randn(F, 1)
    nearly = b * (1 + 1e-6)

    content = SlotContent(slices=((torch.cat([a, a]), torch.cat([b, -nearly], dim=1)),))

    assert content.has_effect()


def test_experts_that_cancel_each_other_have_no_effect() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(X, 1, H), torch.randn(X, F, 1)
    pair = (torch.cat([a, a], dim=1), torch.cat([b, -b], dim=2))

    assert not ExpertContent(w13=(pair, None)).has_effect()
    assert ExpertContent(w13=(pair, None), w2=(a, b)).has_effect()


def test_an_adapter_that_cancels_itself_out_is_refused_with_numbers(tmp_path: Path) -> None:
    paths = {"layers.0.attn.q_proj": LINEARS["layers.0.attn.q_proj"]}
    raw = build_raw_adapter(paths, r=2)
    for key, tensor in raw.tensors.items():
        if "lora_A" in key:
            tensor[1] = tensor[0]
        else:
            tensor[:, 1] = -tensor[:, 0]
    manager = LoraModelManager(TinyDecoder(), LoraModelConfig(packed_modules=PACKED_MODULES))

    with pytest.raises(AdapterMismatchError, match="without effect") as caught:
        manager.prepare(load_adapter(save_adapter(raw, tmp_path)))

    (problem,) = caught.value.problems
    assert "norm of the update: 0 over 1 modules" in problem.found
