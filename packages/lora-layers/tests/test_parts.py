"""Gains, biases and whole modules in a mixed batch, each against its own float64 arithmetic.

The adapters are built in memory; a model of two projections is enough, since a part belongs to one
module.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lora_layers import LoraModelConfig, LoraModelManager, NotLinearError
from lora_layers.testing import build_adapter, runs
from lora_weights import FullModule, LoraPair, ModulePart

if TYPE_CHECKING:
    from pathlib import Path

    from lora_layers import RowRun
    from lora_weights import Adapter

IN, WIDTHS, VOCAB = 12, {"q_proj": 16, "k_proj": 8}, 20
PACKED = {"qk_proj": ("q_proj", "k_proj")}


class Block(nn.Module):
    """An embedding and two projections of it, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, IN)
        self.q_proj = nn.Linear(IN, WIDTHS["q_proj"])
        self.k_proj = nn.Linear(IN, WIDTHS["k_proj"], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids `[T]` to `[T, 24]`."""
        x = self.embed(ids)
        return torch.cat([self.q_proj(x), self.k_proj(x)], dim=-1)


@pytest.fixture(params=[True, False], ids=["packed", "single"])
def wrapped(request: pytest.FixtureRequest) -> tuple[LoraModelManager, dict[str, Tensor]]:
    """Return a wrapped block and a copy of its state."""
    torch.manual_seed(0)
    block = Block().requires_grad_(requires_grad=False)
    state = {name: value.clone().double() for name, value in block.state_dict().items()}
    config = LoraModelConfig(
        max_loras=4, max_lora_rank=8, packed_modules=PACKED if request.param else {}
    )
    return LoraModelManager(block, config), state


def normal(*shape: int, seed: int) -> Tensor:
    """Return random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pair(out: int, *, seed: int, rank: int = 3) -> LoraPair:
    """Return a random pair of a projection."""
    return LoraPair(lora_a=normal(rank, IN, seed=seed), lora_b=normal(out, rank, seed=seed + 1))


@pytest.fixture
def shell(tmp_path: Path) -> Adapter:
    """Return an adapter whose parts the tests replace."""
    return build_adapter(tmp_path, ["layers.0.attn.q_proj"]).adapter


def activate(manager: LoraModelManager, shell: Adapter, **parts: dict[str, ModulePart]) -> None:
    """Prepare, register and activate one adapter for each set of parts."""
    for key, modules in parts.items():
        manager.register(key, manager.prepare(replace(shell, parts=modules)))
        manager.activate(key)


def run(manager: LoraModelManager, ids: Tensor, *rows: RowRun) -> Tensor:
    """Run one step."""
    manager.set_routing(rows, rows)
    return manager.model(ids)  # type: ignore[no-any-return]


IDS = torch.tensor([3, 7, 7, 1, 0, 19, 3, 3])
MIXED = runs((2, "one"), (1, None), (3, "two"), (1, "one"), (1, None))
ONE, TWO, BASE = [0, 1, 6], [3, 4, 5], [2, 7]


def base_q(state: dict[str, Tensor], rows: list[int]) -> tuple[Tensor, Tensor]:
    """Return inputs and base outputs of q_proj for some rows, float64."""
    x = state["embed.weight"][IDS[rows]]
    return x, functional.linear(x, state["q_proj.weight"], state["q_proj.bias"])


def test_dora_is_magnitude_over_norm_of_the_updated_weight_and_leaves_the_bias_alone(
    wrapped: tuple[LoraModelManager, dict[str, Tensor]], shell: Adapter
) -> None:
    manager, state = wrapped
    one, two = pair(16, seed=1), pair(16, seed=5)
    magnitude = normal(16, seed=9).abs() + 0.5
    base = run(manager, IDS, *runs((8, None))).clone()
    activate(
        manager,
        shell,
        one={"q_proj": ModulePart(pair=one, magnitude=magnitude)},
        two={"q_proj": ModulePart(pair=two)},
    )

    mixed = run(manager, IDS, *MIXED)

    x, _ = base_q(state, ONE)
    updated = state["q_proj.weight"] + one.lora_b.double() @ one.lora_a.double()
    norm = updated.norm(dim=1, keepdim=True)
    expected = functional.linear(
        x, magnitude.double()[:, None] * updated / norm, state["q_proj.bias"]
    )
    torch.testing.assert_close(mixed[ONE, :16].double(), expected, rtol=1e-5, atol=1e-5)
    x, y = base_q(state, TWO)
    plain = y + x @ (two.lora_b.double() @ two.lora_a.double()).t()
    torch.testing.assert_close(mixed[TWO, :16].double(), plain, rtol=1e-5, atol=1e-5)
    assert torch.equal(mixed[BASE], base[BASE])
    assert torch.equal(mixed[:, 16:], base[:, 16:])


def test_trained_biases_replace_and_lora_biases_add(
    wrapped: tuple[LoraModelManager, dict[str, Tensor]], shell: Adapter
) -> None:
    manager, state = wrapped
    trained, added = normal(16, seed=2), normal(8, seed=3)
    base = run(manager, IDS, *runs((8, None))).clone()
    activate(
        manager,
        shell,
        one={"q_proj": ModulePart(bias=trained)},
        two={"k_proj": ModulePart(pair=pair(8, seed=4), lora_bias=added)},
    )

    mixed = run(manager, IDS, *MIXED)

    x, y = base_q(state, ONE)
    expected = y - state["q_proj.bias"] + trained.double()
    torch.testing.assert_close(mixed[ONE, :16].double(), expected, rtol=1e-5, atol=1e-5)
    x, _ = base_q(state, TWO)
    two = pair(8, seed=4)
    weight = state["k_proj.weight"] + two.lora_b.double() @ two.lora_a.double()
    expected = functional.linear(x, weight, added.double())
    torch.testing.assert_close(mixed[TWO, 16:].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(mixed[BASE], base[BASE])


def test_a_gain_without_a_pair_multiplies_the_whole_output(
    wrapped: tuple[LoraModelManager, dict[str, Tensor]], shell: Adapter
) -> None:
    manager, state = wrapped
    gain = normal(16, seed=2)
    activate(
        manager,
        shell,
        one={"q_proj": ModulePart(gain=gain)},
        two={"k_proj": ModulePart(pair=pair(8, seed=4))},
    )

    mixed = run(manager, IDS, *MIXED)

    _, y = base_q(state, ONE)
    torch.testing.assert_close(mixed[ONE, :16].double(), y * gain.double(), rtol=1e-5, atol=1e-5)
    _, y = base_q(state, TWO)
    torch.testing.assert_close(mixed[TWO, :16].double(), y, rtol=1e-5, atol=1e-5)


def test_whole_modules_replace_only_their_own_rows(
    wrapped: tuple[LoraModelManager, dict[str, Tensor]], shell: Adapter
) -> None:
    manager, state = wrapped
    weight, bias = normal(16, IN, seed=6), normal(16, seed=7)
    table = normal(VOCAB, IN, seed=8)
    base = run(manager, IDS, *runs((8, None))).clone()
    activate(
        manager,
        shell,
        one={"q_proj": ModulePart(full=FullModule(weight=weight, bias=bias))},
        two={"embed": ModulePart(full=FullModule(weight=table))},
    )

    mixed = run(manager, IDS, *MIXED)

    x, _ = base_q(state, ONE)
    expected = functional.linear(x, weight.double(), bias.double())
    torch.testing.assert_close(mixed[ONE, :16].double(), expected, rtol=1e-5, atol=1e-5)
    x = table[IDS[TWO]].double()
    expected = functional.linear(x, state["q_proj.weight"], state["q_proj.bias"])
    torch.testing.assert_close(mixed[TWO, :16].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(mixed[BASE], base[BASE])


def test_a_slot_reused_by_a_plain_adapter_keeps_nothing_of_gains_biases_and_whole_modules(
    shell: Adapter,
) -> None:
    torch.manual_seed(0)
    manager = LoraModelManager(
        Block().requires_grad_(requires_grad=False),
        LoraModelConfig(max_loras=1, packed_modules=PACKED),
    )
    plain = {"q_proj": ModulePart(pair=pair(16, seed=1))}
    activate(manager, shell, plain=plain)
    alone = run(manager, IDS, *runs((8, "plain"))).clone()
    rich = {
        "q_proj": ModulePart(pair=pair(16, seed=2), magnitude=torch.ones(16)),
        "k_proj": ModulePart(full=FullModule(weight=normal(8, IN, seed=3))),
        "embed": ModulePart(full=FullModule(weight=normal(VOCAB, IN, seed=4))),
    }
    activate(manager, shell, rich=rich)
    assert manager.slot_of("plain") is None
    manager.activate("plain")

    assert torch.equal(run(manager, IDS, *runs((8, "plain"))), alone)


@pytest.mark.parametrize("adapters", [[("one", 0.5)], [("one", 1.0), ("two", 1.0)]])
@pytest.mark.parametrize(
    "part",
    [
        ModulePart(gain=torch.full((16,), 2.0)),
        ModulePart(full=FullModule(weight=torch.ones(16, IN), bias=torch.ones(16))),
    ],
    ids=["gain", "full"],
)
def test_scaling_or_mixing_an_adapter_that_is_not_linear_is_refused_before_the_forward(
    wrapped: tuple[LoraModelManager, dict[str, Tensor]],
    shell: Adapter,
    part: ModulePart,
    adapters: list[tuple[str, float]],
) -> None:
    manager, _ = wrapped
    activate(manager, shell, one={"q_proj": part}, two={"k_proj": ModulePart(pair=pair(8, seed=4))})

    with pytest.raises(NotLinearError, match="one"):
        manager.set_routing(runs((2, adapters)), runs((2, adapters)))
    assert not manager.is_linear("one")
    assert manager.is_linear("two")


def test_biases_follow_the_scale_of_a_weighted_set(
    wrapped: tuple[LoraModelManager, dict[str, Tensor]], shell: Adapter
) -> None:
    manager, state = wrapped
    bias = normal(16, seed=3)
    activate(
        manager,
        shell,
        one={"q_proj": ModulePart(pair=pair(16, seed=1), lora_bias=bias)},
        two={"q_proj": ModulePart(pair=pair(16, seed=5))},
    )
    weighted = [("one", 0.5), ("two", -2.0)]

    out = run(manager, IDS, *runs((8, weighted)))[:, :16]

    x, y = base_q(state, list(range(8)))
    one, two = (p.lora_b.double() @ p.lora_a.double() for p in (pair(16, seed=1), pair(16, seed=5)))
    expected = y + x @ (0.5 * one - 2.0 * two).t() + 0.5 * bias.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
