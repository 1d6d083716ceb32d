"""A module that does more than a product: a router's choice under each row's own adapter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lora_layers import AdapterMismatchError, LoraModelConfig, LoraModelManager
from lora_layers.testing import build_adapter, runs
from lora_weights import LoraPair, ModulePart

if TYPE_CHECKING:
    from pathlib import Path

    from lora_weights import Adapter

H, X, K = 6, 5, 2


class Router(nn.Module):
    """Logits, weights and ids of the best experts, as transformers' routers return them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(X, H, generator=generator), requires_grad=False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map `[..., H]` to `[T, X]`, `[T, K]` and `[T, K]`."""
        logits = functional.linear(hidden.reshape(-1, H), self.weight)
        weights, ids = logits.softmax(dim=-1).topk(K)
        return logits, weights / weights.sum(dim=-1, keepdim=True), ids


@pytest.fixture
def shell(tmp_path: Path) -> Adapter:
    """Return an adapter whose parts the tests replace."""
    return build_adapter(tmp_path, ["layers.0.attn.q_proj"]).adapter


def pair(seed: int, rank: int) -> LoraPair:
    """Return a random pair."""
    generator = torch.Generator().manual_seed(seed)
    lora_a = torch.randn(rank, H, generator=generator)
    return LoraPair(lora_a=lora_a, lora_b=torch.randn(X, rank, generator=generator))


def expect(router: Router, hidden: Tensor, *pairs: tuple[LoraPair, float]) -> tuple[Tensor, ...]:
    """Route in float64 with merged weights."""
    copy = Router().double()
    merged = router.weight.double()
    for one, scale in pairs:
        merged = merged + scale * one.lora_b.double() @ one.lora_a.double()
    copy.weight.data = merged
    return tuple(copy(hidden.double()))


def test_each_row_is_routed_by_its_own_merged_weight(shell: Adapter) -> None:
    model = nn.ModuleDict({"gate": Router()})
    router: Router = model["gate"]  # type: ignore[assignment]
    manager = LoraModelManager(model, LoraModelConfig(max_loras=2, max_lora_rank=4))
    one, two = pair(1, 3), pair(2, 1)
    for key, given in (("one", one), ("two", two)):
        part = ModulePart(pair=given)
        manager.register(key, manager.prepare(replace(shell, parts={"gate": part})))
        manager.activate(key)
    hidden = torch.randn(2, 4, H, generator=torch.Generator().manual_seed(5))
    rows = runs((2, "one"), (1, None), (2, [("one", 0.5), ("two", 2.0)]), (2, "two"), (1, "one"))
    manager.set_routing(rows, ())

    found = model["gate"](hidden)

    flat = hidden.reshape(-1, H)
    for index, pairs in (
        ([0, 1, 7], [(one, 1.0)]),
        ([2], []),
        ([3, 4], [(one, 0.5), (two, 2.0)]),
        ([5, 6], [(two, 1.0)]),
    ):
        for output, expected in zip(found, expect(router, flat[index], *pairs), strict=True):
            own = output[index]
            torch.testing.assert_close(own.double(), expected.double(), rtol=1e-5, atol=1e-5)
    base = router(flat)
    assert all(torch.equal(output[2], own[2]) for output, own in zip(found, base, strict=True))


def test_anything_but_a_pair_is_refused_by_name(shell: Adapter) -> None:
    manager = LoraModelManager(nn.ModuleDict({"gate": Router()}), LoraModelConfig())
    part = ModulePart(pair=pair(1, 2), magnitude=torch.ones(X))

    with pytest.raises(AdapterMismatchError, match="gate gain is present, expected a low-rank"):
        manager.prepare(replace(shell, parts={"gate": part}))


def test_a_module_with_further_parameters_is_not_taken_for_one_with_a_matrix() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(X, H))
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x

    model = nn.ModuleDict({"gate": Other(), "proj": nn.Linear(H, H)})

    assert list(LoraModelManager(model, LoraModelConfig()).shapes) == ["proj"]
