"""The registered expert operators: torch's own checks of them, and compiled expert layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from lora_kernels import (
    Backend,
    ExpertWeights,
    KernelArgumentError,
    Routing,
    align_experts,
    build_routing,
    moe_lora_,
    route_tokens,
)
from lora_kernels.library import routing_arguments
from lora_kernels.library_experts import layer_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HIDDEN, WIDTH, EXPERTS, CHOICES, SLOTS = 24, 12, 4, 2, 3


def stage(in_features: int, out_features: tuple[int, ...], seed: int) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)
    weights = ExpertWeights.allocate(
        num_slots=SLOTS,
        num_experts=EXPERTS,
        max_rank=8,
        in_features=in_features,
        out_features=out_features,
        dtype=torch.float32,
        device="cpu",
    )
    for slot, rank in ((0, 4), (2, 7)):
        weights.write_slot(
            slot,
            [
                (
                    torch.randn(EXPERTS, rank, in_features, generator=generator),
                    torch.randn(EXPERTS, out, rank, generator=generator),
                )
                for out in out_features
            ],
        )
    return weights


class ExpertLayer(nn.Module):
    """Router, gated experts and their slots: the whole layer is one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)
        self.w13, self.w2 = stage(HIDDEN, (WIDTH, WIDTH), 0), stage(WIDTH, (HIDDEN,), 1)
        self.routing = route_tokens([], num_slots=SLOTS)

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = torch.topk(self.router(x).softmax(-1), CHOICES)
        pairs = align_experts(self.routing, ids, num_experts=EXPERTS)
        y = torch.einsum("tkoi,ti->tko", self.gate_up[ids], x).flatten(0, 1)
        gate, up = moe_lora_(y, x, self.w13, pairs).chunk(2, 1)
        inner = nn.functional.silu(gate) * up
        down = self.down[ids.flatten()]
        out = torch.einsum("moi,mi->mo", down, inner) * scores.reshape(-1, 1)
        moe_lora_(out, inner, self.w2, pairs, router_weights=scores)
        return out.view(-1, CHOICES, HIDDEN).sum(1)


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def count_graphs() -> int:
    stats: dict[str, int] = torch._dynamo.utils.counters["stats"]
    return stats["unique_graphs"]


@pytest.mark.parametrize("num_entries", [0, 4])
def test_torchs_checks_of_schema_fake_function_and_functionalisation_pass(
    make_expert_step: Callable[..., Any], backend: Backend, num_entries: int
) -> None:
    entries = [(0, 1, 1.0), (1, 0, 0.5), (1, 2, 0.25), (3, 1, 1.0)][:num_entries]
    step = make_expert_step(
        entries=entries, num_tokens=5, ranks=[(8,), (3,), (1,)], has_router_weights=True
    )
    ops = torch.ops.lora_kernels
    layer = layer_arguments(step.weights, step.expert_routing, backend)

    torch.library.opcheck(
        ops.align_experts.default, (step.expert_ids, *routing_arguments(step.routing), 4, 0)
    )
    torch.library.opcheck(
        ops.moe_lora_.default, (step.y.clone(), step.x, step.router_weights, *layer)
    )
    torch.library.opcheck(ops.moe_lora_.default, (step.y.clone(), step.x, None, *layer))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_an_expert_layer_compiles_in_one_graph_and_adds_the_same(compiler: str) -> None:
    module = ExpertLayer()
    compiled = torch.compile(module, fullgraph=True, backend=compiler)

    for slots in ([0, 1, None, 2], [2] * 5, [None] * 4, [0, 0, 2]):
        module.routing = route_tokens(slots, num_slots=SLOTS)
        x = torch.randn(len(slots), HIDDEN)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), module(x))


def test_steps_of_all_kinds_run_in_a_bounded_number_of_graphs() -> None:
    module = ExpertLayer()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    generator = torch.Generator().manual_seed(0)

    def run(num_tokens: int) -> None:
        drawn = torch.randint(-1, SLOTS, (num_tokens,), generator=generator).tolist()
        module.routing = route_tokens([s if s >= 0 else None for s in drawn], num_slots=SLOTS)
        x = torch.randn(num_tokens, HIDDEN, generator=generator)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), module(x))

    for num_tokens in (4, 9, 40, 90):
        run(num_tokens)
    before = count_graphs()
    for num_tokens in (5, 13, 77, 31, 8):
        run(num_tokens)

    assert count_graphs() == before


def test_an_adapter_written_after_compiling_and_weighted_sets_are_seen() -> None:
    module = ExpertLayer()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    module.routing = route_tokens([0, 1, 2, None], num_slots=SLOTS)
    x = torch.randn(4, HIDDEN)
    with torch.no_grad():
        first = compiled(x)

        pair = torch.randn(EXPERTS, 2, HIDDEN), torch.randn(EXPERTS, WIDTH, 2)
        module.w13.write_slot(1, [pair, None])
        second = compiled(x)
        expected = module(x)
        module.routing = build_routing(
            token_idx=[0, 0, 3], slots=[0, 2, 1], scales=[0.5, 0.25, 2.0], num_tokens=4, num_slots=3
        )

        torch.testing.assert_close(second, expected)
        assert not torch.equal(first[1], second[1])
        torch.testing.assert_close(compiled(x), module(x))


def test_a_compiled_layer_refuses_what_the_operators_refuse(
    make_expert_step: Callable[..., Any],
) -> None:
    step = make_expert_step(entries=[(0, 0, 1.0)], num_tokens=2, ranks=[(4,)])

    def add(y: Tensor, routing: Routing) -> Tensor:
        pairs = align_experts(routing, step.expert_ids, num_experts=4)
        return moe_lora_(y, step.x, step.weights, pairs)

    compiled = torch.compile(add, fullgraph=True, backend="aot_eager")

    with pytest.raises(KernelArgumentError, match="2 slots and 4 experts, weights have 1 and 4"):
        compiled(step.y, route_tokens([0, 0], num_slots=2))
