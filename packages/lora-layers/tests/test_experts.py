"""Experts in a mixed batch, each row against dense float64 experts with merged weights.

The experts module is written out here in the form transformers 5 gives its own, all variants: gate
in halves or interleaved, or none; weights as `[X, O, I]` or `[X, I, O]`; with and without bias.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lora_layers import AdapterMismatchError, LoraModelConfig, LoraModelManager
from lora_layers.content import ExpertContent, make_prepared
from lora_layers.errors import UnsupportedModuleError
from lora_layers.testing import runs
from lora_weights import ExpertPair, ExpertPart, load_adapter
from lora_weights.testing import write_adapter

if TYPE_CHECKING:
    from pathlib import Path

X, H, F, K, T = 4, 6, 5, 2, 9


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a family stores and computes its experts."""

    has_gate: bool = True
    has_bias: bool = False
    is_transposed: bool = False
    is_concatenated: bool = True
    has_post_expert_norm: bool = False


FORMS = {
    "mixtral": Form(),
    "gpt-oss": Form(has_bias=True, is_transposed=True, is_concatenated=False),
    "no-gate": Form(has_gate=False),
    "norm": Form(has_post_expert_norm=True),
}


class Experts(nn.Module):
    """Stacked experts that describe themselves; the forward is not to be called."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        for name, value in vars(form).items():
            setattr(self, name, value)
        rows = 2 * F if form.has_gate else F
        first = "gate_up_proj" if form.has_gate else "up_proj"
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> nn.Parameter:
            values = torch.randn(shape, generator=generator) * 0.5
            if form.is_transposed and len(shape) == 3:
                values = values.transpose(1, 2).contiguous()
            return nn.Parameter(values, requires_grad=False)

        setattr(self, first, draw(X, rows, H))
        self.down_proj = draw(X, H, F)
        if form.has_bias:
            setattr(self, f"{first}_bias", draw(X, rows))
            self.down_proj_bias = draw(X, H)

    def act_fn(self, x: Tensor) -> Tensor:
        """Map `[..., F]`."""
        return torch.tanh(x)

    def post_expert_norm(self, x: Tensor) -> Tensor:
        """Map `[..., H]`."""
        return x / (1 + x.abs().amax(dim=-1, keepdim=True))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        if self.is_concatenated:
            gate, up = gate_up.chunk(2, dim=-1)
        else:
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        return torch.tanh(gate) * (up + 1)

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Refuse: the wrapper computes the products itself."""
        raise NotImplementedError


class Block(nn.Module):
    """A router's place and the experts."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.experts = Experts(form)

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Map `[T, H]` to `[T, H]`."""
        return self.experts(hidden, ids, weights)  # type: ignore[no-any-return]


def draw_pair(out: int, in_features: int, rank: int, generator: torch.Generator) -> ExpertPair:
    """Return a random pair for all experts."""
    return ExpertPair(
        lora_a=torch.randn(X, rank, in_features, generator=generator) * 0.5,
        lora_b=torch.randn(X, out, rank, generator=generator) * 0.5,
    )


def draw_part(form: Form, seed: int, rank: int = 2) -> ExpertPart:
    """Return random pairs for every projection."""
    generator = torch.Generator().manual_seed(seed)
    return ExpertPart(
        w1=draw_pair(F, H, rank, generator),
        w2=draw_pair(H, F, rank + 1, generator),
        w3=draw_pair(F, H, rank, generator) if form.has_gate else None,
    )


def delta(pair: ExpertPair | None, shape: tuple[int, int]) -> Tensor:
    """Return `B A` of every expert, float64 `[X, O, I]`."""
    if pair is None:
        return torch.zeros(X, *shape, dtype=torch.float64)
    return (pair.lora_b.double() @ pair.lora_a.double()).expand(X, *shape)


def dense(
    experts: Experts, hidden: Tensor, ids: Tensor, weights: Tensor, *parts: tuple[ExpertPart, float]
) -> Tensor:
    """Compute one adapter's rows in float64 with the deltas merged into the weights."""
    module: Any = experts
    first = "gate_up_proj" if module.has_gate else "up_proj"
    up_XOI = getattr(module, first).double()
    down_XOI = module.down_proj.double()
    if module.is_transposed:
        up_XOI, down_XOI = up_XOI.transpose(1, 2), down_XOI.transpose(1, 2)
    for part, scale in parts:
        gate = delta(part.w1, (F, H))
        if module.has_gate:
            halves = torch.stack([gate, delta(part.w3, (F, H))])
            gate = torch.cat(list(halves), dim=1)
            if not module.is_concatenated:
                gate = halves.permute(1, 2, 0, 3).reshape(X, 2 * F, H)
        up_XOI = up_XOI + scale * gate
        down_XOI = down_XOI + scale * delta(part.w2, (H, F))
    out = torch.zeros(len(hidden), H, dtype=torch.float64)
    for t, k in torch.cartesian_prod(torch.arange(len(hidden)), torch.arange(K)).tolist():
        x = int(ids[t, k])
        if not 0 <= x < X:
            continue
        bias = getattr(module, f"{first}_bias")[x].double() if module.has_bias else None
        inner = functional.linear(hidden[t].double(), up_XOI[x], bias)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        bias = module.down_proj_bias[x].double() if module.has_bias else None
        y = functional.linear(inner, down_XOI[x], bias)
        y = module.post_expert_norm(y) if module.has_post_expert_norm else y
        out[t] += weights[t, k].double() * y
    return out


@dataclass(frozen=True, kw_only=True)
class Step:
    """Inputs of an experts module."""

    hidden: Tensor
    ids: Tensor
    weights: Tensor

    def rows(self, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of some rows."""
        return self.hidden[rows], self.ids[rows], self.weights[rows]


@pytest.fixture
def step() -> Step:
    """Return a step in which some expert is used by nobody and one choice is empty."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(X - 1, generator=generator)[:K] for _ in range(T)])
    ids[5, 1] = X
    return Step(
        hidden=torch.randn(T, H, generator=generator),
        ids=ids,
        weights=torch.rand(T, K, generator=generator),
    )


@pytest.fixture(params=list(FORMS.values()), ids=list(FORMS))
def form(request: pytest.FixtureRequest) -> Form:
    """Return each form in turn."""
    found: Form = request.param
    return found


def manage(form: Form, **fields: Any) -> tuple[LoraModelManager, Experts]:
    """Return a wrapped block, and its experts unwrapped."""
    block = Block(form)
    experts = block.experts
    return LoraModelManager(block, LoraModelConfig(max_loras=3, max_lora_rank=4, **fields)), experts


def activate(manager: LoraModelManager, **parts: ExpertPart) -> None:
    """Register and activate adapters that hold nothing but pairs of experts."""
    for key, part in parts.items():
        layout = manager._preparer._experts["experts"]
        manager.register(key, make_prepared({"experts": layout.content(part)}))
        manager.activate(key)


MIXED = runs((2, "one"), (2, None), (3, "two"), (1, "one"), (1, None))
ONE, TWO, BASE = [0, 1, 7], [4, 5, 6], [2, 3, 8]


def test_each_row_of_a_mixed_batch_has_its_own_experts(form: Form, step: Step) -> None:
    manager, experts = manage(form)
    one, two = draw_part(form, 1), draw_part(form, 2, rank=3)
    manager.set_routing(runs((T, None)), ())
    base = manager.model(step.hidden, step.ids, step.weights)
    activate(manager, one=one, two=two)

    manager.set_routing(MIXED, ())
    mixed = manager.model(step.hidden, step.ids, step.weights)

    for rows, part in ((ONE, one), (TWO, two)):
        expected = dense(experts, *step.rows(rows), (part, 1.0))
        torch.testing.assert_close(mixed[rows].double(), expected, rtol=1e-5, atol=1e-5)
        assert (mixed[rows] - base[rows]).abs().amax() > 0.05
    expected = dense(experts, *step.rows(BASE))
    torch.testing.assert_close(base[BASE].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(mixed[BASE], base[BASE])


def test_a_weighted_set_adds_up_before_the_activation(form: Form, step: Step) -> None:
    manager, experts = manage(form)
    one, two = draw_part(form, 1), draw_part(form, 2)
    activate(manager, one=one, two=two)
    manager.set_routing(runs((T, [("one", 0.5), ("two", -1.5)])), ())

    found = manager.model(step.hidden, step.ids, step.weights)

    expected = dense(experts, step.hidden, step.ids, step.weights, (one, 0.5), (two, -1.5))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("present", ["w1", "w2", "w3"])
def test_an_absent_projection_is_as_the_base_has_it(present: str, step: Step) -> None:
    manager, experts = manage(FORMS["mixtral"])
    whole = draw_part(FORMS["mixtral"], 1)
    part = ExpertPart(**{present: getattr(whole, present)})
    activate(manager, one=part)
    manager.set_routing(runs((T, "one")), ())

    found = manager.model(step.hidden, step.ids, step.weights)

    expected = dense(experts, step.hidden, step.ids, step.weights, (part, 1.0))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def shared_outer(form: Form) -> ExpertPart:
    """Return a part whose factors next to the hidden state are one for all experts."""
    part = draw_part(form, 3)
    assert part.w1 is not None
    assert part.w2 is not None
    assert part.w3 is not None
    return ExpertPart(
        w1=replace(part.w1, lora_a=part.w1.lora_a[:1]),
        w2=replace(part.w2, lora_b=part.w2.lora_b[:1]),
        w3=replace(part.w3, lora_a=part.w3.lora_a[:1]),
    )


@pytest.mark.parametrize("shares_outer", [True, False])
def test_shared_outer_factors_work_in_slots_of_both_kinds(
    step: Step, *, shares_outer: bool
) -> None:
    form = FORMS["mixtral"]
    manager, experts = manage(form, moe_shared_loras=shares_outer)
    part = shared_outer(form)
    activate(manager, one=part)
    manager.set_routing(runs((T, "one")), ())

    found = manager.model(step.hidden, step.ids, step.weights)

    expected = dense(experts, step.hidden, step.ids, step.weights, (part, 1.0))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_slots_for_shared_outer_factors_are_smaller_and_refuse_others_by_name(
    tmp_path: Path,
) -> None:
    form = FORMS["mixtral"]
    plain, shared = manage(form)[0], manage(form, moe_shared_loras=True)[0]
    assert shared.slot_bytes < plain.slot_bytes
    sizes = {"gate_proj": (H, F), "up_proj": (H, F), "down_proj": (F, H)}
    modules = {f"experts.{x}.{name}": size for x in range(X) for name, size in sizes.items()}
    adapter = load_adapter(write_adapter(tmp_path, modules, r=3))

    assert plain.prepare(adapter).rank == 3
    with pytest.raises(AdapterMismatchError) as caught:
        shared.prepare(adapter)
    texts = [str(problem) for problem in caught.value.problems]
    assert len(texts) == 3
    assert all("moe_shared_loras" in text for text in texts)
    assert "lora_A of w1 is one for each of 4 experts" in texts[0]


def test_a_slot_reused_by_another_adapter_keeps_nothing(step: Step) -> None:
    form = FORMS["mixtral"]
    manager, experts = manage(form)
    small = ExpertPart(w2=draw_part(form, 5, rank=1).w2)
    activate(manager, big=draw_part(form, 1, rank=3))
    slot = manager.slot_of("big")
    manager.remove("big")
    activate(manager, small=small)
    assert manager.slot_of("small") == slot
    manager.set_routing(runs((T, "small")), ())

    found = manager.model(step.hidden, step.ids, step.weights)

    expected = dense(experts, step.hidden, step.ids, step.weights, (small, 1.0))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_experts_in_an_unknown_form_are_refused_by_class_where_they_are_asked_for() -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down_proj = nn.Parameter(torch.ones(X, H, F))

    model = nn.ModuleDict({"experts": Opaque(), "proj": nn.Linear(H, H)})

    with pytest.raises(UnsupportedModuleError, match="is a Opaque, which gives deltas of experts"):
        LoraModelManager(model, LoraModelConfig(target_modules=frozenset({"experts"})))
    assert list(LoraModelManager(model, LoraModelConfig()).shapes) == ["proj"]


def test_a_step_without_tokens_for_any_expert_gives_zeros() -> None:
    form = FORMS["mixtral"]
    manager, _ = manage(form)
    activate(manager, one=draw_part(form, 1))
    manager.set_routing(runs((2, "one")), ())
    ids = torch.full((2, K), X)

    found = manager.model(torch.ones(2, H), ids, torch.ones(2, K))

    assert torch.equal(found, torch.zeros(2, H))


def test_dummies_fill_experts_too_and_change_nothing(step: Step) -> None:
    manager, _ = manage(FORMS["mixtral"])
    manager.set_routing(runs((T, None)), ())
    base = manager.model(step.hidden, step.ids, step.weights)

    with manager.warm_up(2) as keys:
        content = manager.create_dummy_adapters(1)["warmup_1"].contents["experts"]
        assert isinstance(content, ExpertContent)
        manager.set_routing(runs((4, keys[0]), (5, keys[1])), ())
        assert torch.equal(manager.model(step.hidden, step.ids, step.weights), base)
