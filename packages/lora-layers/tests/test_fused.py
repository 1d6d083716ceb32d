"""Adapters on a whole and on its parts, whichever of the two the model stores."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from lora_layers import AdapterMismatchError, LoraModelConfig, LoraModelManager
from lora_layers.testing import build_adapter, runs
from lora_weights import LoraPair, ModulePart

if TYPE_CHECKING:
    from pathlib import Path

    from lora_weights import Adapter

IN = 12
ROWS = {"q_proj": 16, "k_proj": 8, "v_proj": 8}
FUSED = {"qkv_proj": ROWS}


@pytest.fixture
def shell(tmp_path: Path) -> Adapter:
    """Return an adapter whose parts the tests replace."""
    return build_adapter(tmp_path, ["layers.0.attn.q_proj"]).adapter


def make_pair(out: int, *, seed: int, rank: int = 3) -> LoraPair:
    """Return a random pair."""
    generator = torch.Generator().manual_seed(seed)
    return LoraPair(
        lora_a=torch.randn(rank, IN, generator=generator),
        lora_b=torch.randn(out, rank, generator=generator),
    )


def make_models() -> tuple[LoraModelManager, LoraModelManager, Tensor]:
    """Return the same projection stored as one and as three, both wrapped, and its weight."""
    torch.manual_seed(0)
    whole = nn.ModuleDict({"attn": nn.ModuleDict({"qkv_proj": nn.Linear(IN, 32, bias=False)})})
    weight = whole["attn"]["qkv_proj"].weight.detach().clone()  # type: ignore[index]
    split = nn.ModuleDict({name: nn.Linear(IN, rows, bias=False) for name, rows in ROWS.items()})
    for module, part in zip(split.values(), weight.split(list(ROWS.values())), strict=True):
        module.weight.data = part.clone()
    config = LoraModelConfig(
        max_loras=2, max_lora_rank=8, fused_modules=FUSED, packed_modules={"qkv_proj": tuple(ROWS)}
    )
    whole.requires_grad_(requires_grad=False)
    split.requires_grad_(requires_grad=False)
    return (
        LoraModelManager(whole, config),
        LoraModelManager(nn.ModuleDict({"attn": split}), config),
        weight.double(),
    )


def outputs(manager: LoraModelManager, adapter: Adapter, x: Tensor) -> Tensor:
    """Return q, k and v side by side for rows that alternate between base and the adapter."""
    manager.register("a", manager.prepare(adapter))
    manager.activate("a")
    rows = runs((1, "a"), (1, None), (2, "a"))
    manager.set_routing(rows, rows)
    attn = manager.model.get_submodule("attn")
    if "qkv_proj" in dict(attn.named_children()):
        return attn.get_submodule("qkv_proj")(x)  # type: ignore[no-any-return]
    return torch.cat([attn.get_submodule(name)(x) for name in ROWS], dim=-1)


def expect(weight: Tensor, delta: Tensor, x: Tensor) -> Tensor:
    """Return the float64 outputs, row 1 without the delta."""
    y = x.double() @ (weight + delta).t()
    y[1] = x[1].double() @ weight.t()
    return y


def test_c25_an_adapter_on_the_whole_works_on_both_forms_of_the_base(shell: Adapter) -> None:
    whole, split, weight = make_models()
    pair = make_pair(32, seed=1)
    adapter = replace(shell, parts={"attn.qkv_proj": ModulePart(pair=pair)})
    x = torch.randn(4, IN)

    found = [outputs(manager, adapter, x) for manager in (whole, split)]

    expected = expect(weight, pair.lora_b.double() @ pair.lora_a.double(), x)
    for y in found:
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_c25_an_adapter_on_the_parts_works_on_both_forms_of_the_base(shell: Adapter) -> None:
    whole, split, weight = make_models()
    pairs = {"k_proj": make_pair(8, seed=2, rank=2), "v_proj": make_pair(8, seed=3, rank=5)}
    parts = {f"attn.{name}": ModulePart(pair=pair) for name, pair in pairs.items()}
    adapter = replace(shell, parts=parts)
    x = torch.randn(4, IN)

    found = [outputs(manager, adapter, x) for manager in (whole, split)]

    delta = torch.zeros(32, IN, dtype=torch.float64)
    for start, pair in zip((16, 24), pairs.values(), strict=True):
        delta[start : start + 8] = pair.lora_b.double() @ pair.lora_a.double()
    for y in found:
        torch.testing.assert_close(y.double(), expect(weight, delta, x), rtol=1e-5, atol=1e-5)


def test_dora_on_the_whole_takes_the_norms_of_the_whole_weight(shell: Adapter) -> None:
    whole, split, weight = make_models()
    pair, magnitude = make_pair(32, seed=1), torch.rand(32) + 0.5
    part = ModulePart(pair=pair, magnitude=magnitude)
    adapter = replace(shell, parts={"attn.qkv_proj": part})
    x = torch.randn(4, IN)

    found = [outputs(manager, adapter, x) for manager in (whole, split)]

    updated = weight + pair.lora_b.double() @ pair.lora_a.double()
    dora = magnitude.double()[:, None] * updated / updated.norm(dim=1, keepdim=True)
    for y in found:
        torch.testing.assert_close(
            y.double(), expect(weight, dora - weight, x), rtol=1e-5, atol=1e-5
        )


def test_c25_parts_of_another_size_are_refused_with_found_and_expected(shell: Adapter) -> None:
    for manager in make_models()[:2]:
        parts = {
            "attn.q_proj": ModulePart(pair=make_pair(8, seed=1)),
            "attn.k_proj": ModulePart(pair=make_pair(16, seed=2)),
        }

        with pytest.raises(AdapterMismatchError) as caught:
            manager.prepare(replace(shell, parts=parts))

        texts = sorted(str(problem) for problem in caught.value.problems)
        assert "attn.k_proj lora_B is [16, 3], expected [8, 3]" in texts[0]
        assert "attn.q_proj lora_B is [8, 3], expected [16, 3]" in texts[1]


def test_a_whole_and_one_of_its_parts_in_one_adapter_are_refused(shell: Adapter) -> None:
    for manager in make_models()[:2]:
        parts = {
            "attn.qkv_proj": ModulePart(pair=make_pair(32, seed=1)),
            "attn.q_proj": ModulePart(pair=make_pair(16, seed=2)),
        }

        with pytest.raises(AdapterMismatchError, match="as a whole and by its member"):
            manager.prepare(replace(shell, parts=parts))


def test_a_module_of_another_size_than_its_declared_parts_keeps_its_one_name(
    shell: Adapter,
) -> None:
    model = nn.ModuleDict({"qkv_proj": nn.Linear(IN, 30)})
    manager = LoraModelManager(model, LoraModelConfig(fused_modules=FUSED))

    assert list(manager.shapes) == ["qkv_proj"]
    parts = {"qkv_proj": ModulePart(pair=make_pair(30, seed=1))}
    assert manager.prepare(replace(shell, parts=parts)).rank == 3
    with pytest.raises(AdapterMismatchError, match="q_proj"):
        manager.prepare(replace(shell, parts={"q_proj": ModulePart(pair=make_pair(16, seed=1))}))
