"""The registered operators: torch's own checks of them, and compiled modules that use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from lora_kernels import (
    Backend,
    KernelArgumentError,
    Routing,
    StackedWeights,
    apply_lora_,
    build_routing,
    embedding_lora_,
    expand_,
    route_tokens,
    shrink,
)
from lora_kernels.library import step_arguments
from lora_kernels.testing import random_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Wrapped(nn.Module):
    """A packed linear module with slots, as an engine has many."""

    def __init__(self, num_layers: int = 1) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(24, 24) for _ in range(num_layers))
        self.stacks = [
            random_weights(
                [4, (0, 8), 3],
                max_rank=8,
                in_features=24,
                out_features=(16, 8),
                dtype=torch.float32,
                generator=torch.Generator().manual_seed(layer),
            )
            for layer in range(num_layers)
        ]
        self.routing = route_tokens([], num_slots=3)

    def forward(self, x: Tensor) -> Tensor:
        for linear, weights in zip(self.linears, self.stacks, strict=True):
            y = linear(x)
            apply_lora_(y.view(-1, 24), x.view(-1, 24), weights, self.routing)
            x = torch.tanh(y)
        return x


class WrappedEmbedding(nn.Module):
    """Look-up, then `shrink` and `expand_` by hand."""

    def __init__(self, table: StackedWeights, head: StackedWeights, routing: Routing) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 24)
        self.table, self.head, self.routing = table, head, routing

    def forward(self, ids: Tensor) -> Tensor:
        y = embedding_lora_(self.embedding(ids), ids, self.table, self.routing)
        return expand_(y.clone(), shrink(y, self.head, self.routing), self.head, self.routing)


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def count_graphs() -> int:
    stats: dict[str, int] = torch._dynamo.utils.counters["stats"]
    return stats["unique_graphs"]


@pytest.fixture
def step(make_step: Callable[..., Any]) -> Any:
    step = make_step(
        entries=[(0, 1, 1.0), (1, 0, 0.5), (1, 2, 0.25), (3, 3, 1.0)],
        num_tokens=5,
        ranks=[(8,), (3,), (1,), (0,)],
        in_features=11,
    )
    step.weights.write_slot(3, [None], gain=torch.full((24,), 2.0), bias=torch.ones(24))
    return step


@pytest.mark.parametrize("num_entries", [0, 4])
def test_torchs_checks_of_schema_fake_function_and_functionalisation_pass(
    step: Any, backend: Backend, num_entries: int
) -> None:
    routing = step.routing if num_entries else route_tokens([None] * 5, num_slots=4)
    how = step_arguments(step.weights, routing, backend, batch_invariant=True)
    v = shrink(step.x, step.weights, routing)
    ids = torch.tensor([3, 0, 10, 2, 5])
    ops = torch.ops.lora_kernels

    torch.library.opcheck(ops.shrink.default, (step.x, *how))
    torch.library.opcheck(ops.expand_.default, (step.y.clone(), v, *how))
    torch.library.opcheck(ops.apply_lora_.default, (step.y.clone(), step.x, *how))
    torch.library.opcheck(ops.embedding_lora_.default, (step.y.clone(), ids, *how))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_wrapped_module_compiles_in_one_graph_and_adds_the_same(compiler: str) -> None:
    module = Wrapped()
    compiled = torch.compile(module, fullgraph=True, backend=compiler)

    for slots in ([0, 1, None], [2] * 5, [None] * 4):
        module.routing = route_tokens(slots, num_slots=3)
        x = torch.randn(len(slots), 24)
        with torch.no_grad():
            assert torch.equal(compiled(x), module(x))


def test_steps_of_all_kinds_run_in_a_bounded_number_of_graphs() -> None:
    module = Wrapped(num_layers=3)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    generator = torch.Generator().manual_seed(0)

    def run(num_tokens: int) -> None:
        drawn = torch.randint(-1, 3, (num_tokens,), generator=generator).tolist()
        module.routing = route_tokens([s if s >= 0 else None for s in drawn], num_slots=3)
        x = torch.randn(num_tokens, 24, generator=generator)
        with torch.no_grad():
            assert torch.equal(compiled(x), module(x))

    for num_tokens in (4, 9, 40, 300):
        run(num_tokens)
    before = count_graphs()
    for num_tokens in (5, 13, 77, 200, 31, 8):
        run(num_tokens)

    assert count_graphs() == before


def test_an_adapter_written_after_compiling_is_seen() -> None:
    module = Wrapped()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    module.routing = route_tokens([0, 1, 2, None], num_slots=3)
    x = torch.randn(4, 24)
    with torch.no_grad():
        compiled(x)

        module.stacks[0].write_slot(1, [(torch.randn(2, 24), torch.randn(16, 2)), None])
        pairs_only = compiled(x)
        same = module(x)
        module.stacks[0].write_slot(2, [None, None], gain=torch.full((24,), 3.0))
        with_gain = compiled(x)

        assert torch.equal(pairs_only, same)
        assert torch.equal(with_gain, module(x))


def test_embedding_shrink_and_expand_compile_in_one_graph(step: Any) -> None:
    head = random_weights(
        [2, 3, 4, 5],
        max_rank=8,
        in_features=24,
        out_features=(24,),
        dtype=torch.float32,
        generator=torch.Generator().manual_seed(3),
    )
    module = WrappedEmbedding(step.weights, head, step.routing)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    ids = torch.tensor([3, 0, 10, 2, 5])

    with torch.no_grad():
        assert torch.equal(compiled(ids), module(ids))


def test_routings_that_share_a_tensor_are_told_apart() -> None:
    module = Wrapped()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    token_idx, x = torch.tensor([0, 1]), torch.randn(3, 24)

    for slot, scale in ((0, 1.0), (2, 1.0), (2, 0.5)):
        module.routing = Routing.from_segments(
            token_idx=token_idx,
            scales=torch.full((2,), scale),
            seg_indptr=torch.tensor([0, 2]),
            seg_slots=torch.tensor([slot]),
            num_tokens=3,
            num_slots=3,
        )
        with torch.no_grad():
            assert torch.equal(compiled(x), module(x))


def test_a_compiled_module_refuses_what_the_operators_refuse(step: Any) -> None:
    def add(y: Tensor, x: Tensor, routing: Routing) -> Tensor:
        return apply_lora_(y, x, step.weights, routing)

    compiled = torch.compile(add, fullgraph=True, backend="aot_eager")
    mixed = build_routing(token_idx=[0, 0], slots=[0, 3], num_tokens=5, num_slots=4)

    with pytest.raises(KernelArgumentError, match="gain"):
        compiled(step.y, step.x, mixed)
    with pytest.raises(KernelArgumentError, match="routing is for 7 slots"):
        compiled(step.y, step.x, route_tokens([0] * 5, num_slots=7))


@pytest.mark.inductor
def test_inductor_compiles_a_wrapped_module_on_a_cpu() -> None:
    module = Wrapped(num_layers=2)
    compiled = torch.compile(module, fullgraph=True)
    module.routing = route_tokens([0, 1, None, 2, 2], num_slots=3)
    x = torch.randn(5, 24)

    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))
