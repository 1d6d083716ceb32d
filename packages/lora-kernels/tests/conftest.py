"""A step of random data with its exact result, in float64 and without any of the package's code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from lora_kernels import (
    Backend,
    ExpertRouting,
    ExpertWeights,
    Routing,
    StackedWeights,
    align_experts,
    build_routing,
)
from lora_kernels._aten import plan as plan_module
from lora_kernels.native import why_not_native

if TYPE_CHECKING:
    from lora_kernels._aten.plan import Way

Entry = tuple[int, int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Inputs of `apply_lora_` and the float64 result."""

    x: Tensor
    y: Tensor
    weights: StackedWeights
    routing: Routing
    pairs: list[list[tuple[Tensor, Tensor] | None]]
    entries: list[Entry]
    exact: Tensor
    reduction: int


StepBuilder = Callable[..., Step]


def exact_apply(
    y: Tensor,
    x: Tensor,
    pairs: Sequence[Sequence[tuple[Tensor, Tensor] | None]],
    entries: Sequence[Entry],
    widths: Sequence[int],
) -> Tensor:
    result = y.double().clone()
    for token, slot, scale in entries:
        low = 0
        for pair, width in zip(pairs[slot], widths, strict=True):
            if pair is not None:
                delta = pair[1].double() @ (pair[0].double() @ x[token].double())
                result[token, low : low + width] += scale * delta
            low += width
    return result


def build_step(
    *,
    entries: Sequence[Entry],
    num_tokens: int,
    ranks: Sequence[Sequence[int]],
    max_rank: int = 64,
    in_features: int = 40,
    widths: Sequence[int] = (24,),
    dtype: torch.dtype = torch.float32,
    x_dtype: torch.dtype | None = None,
    y_dtype: torch.dtype | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Step:
    """Build a step; `ranks[slot][slice]`, 0 = absent. Pairs and exact result are on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weights = StackedWeights.allocate(
        num_slots=len(ranks),
        max_rank=max_rank,
        in_features=in_features,
        out_features=widths,
        dtype=dtype,
        device=device,
    )
    pairs: list[list[tuple[Tensor, Tensor] | None]] = []
    for slot, by_slice in enumerate(ranks):
        slices: list[tuple[Tensor, Tensor] | None] = []
        for rank, width in zip(by_slice, widths, strict=True):
            lora_a = (draw(rank, in_features) / math.sqrt(in_features)).to(dtype)
            lora_b = (draw(width, rank) / math.sqrt(max(rank, 1))).to(dtype)
            slices.append((lora_a, lora_b) if rank else None)
        weights.write_slot(slot, slices)
        pairs.append(slices)
    x = draw(num_tokens, in_features).to(x_dtype or dtype)
    y = draw(num_tokens, sum(widths)).to(y_dtype or dtype)
    routing = build_routing(
        token_idx=[token for token, _, _ in entries],
        slots=[slot for _, slot, _ in entries],
        scales=[scale for _, _, scale in entries],
        num_tokens=num_tokens,
        num_slots=len(ranks),
        device=device,
    )
    return Step(
        x=x.to(device),
        y=y.to(device),
        weights=weights,
        routing=routing,
        pairs=pairs,
        entries=list(entries),
        exact=exact_apply(y, x, pairs, entries, widths),
        reduction=max(in_features, max_rank),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStep:
    """Inputs of `moe_lora_` and the float64 result."""

    x: Tensor
    y: Tensor
    weights: ExpertWeights
    routing: Routing
    expert_routing: ExpertRouting
    expert_ids: Tensor
    router_weights: Tensor | None
    pairs: list[list[tuple[Tensor, Tensor] | None]]
    exact: Tensor
    reduction: int


ExpertStepBuilder = Callable[..., ExpertStep]


def exact_moe(  # noqa: PLR0917 - the oracle takes all that a step is
    y: Tensor,
    x: Tensor,
    pairs: Sequence[Sequence[tuple[Tensor, Tensor] | None]],
    entries: Sequence[Entry],
    expert_ids: Tensor,
    router_weights: Tensor | None,
    num_experts: int,
) -> Tensor:
    """Loop over tokens with a weight matrix for each expert, in float64."""
    num_choices = expert_ids.shape[1]
    result = y.double().clone()
    for token, slot, scale in entries:
        for k, expert in enumerate(expert_ids[token].tolist()):
            if not 0 <= expert < num_experts or not any(pairs[slot]):
                continue
            row = token * num_choices + k
            factor = scale if router_weights is None else scale * router_weights[token, k].double()
            x_row = x[row if x.shape[0] == y.shape[0] else token].double()
            parts = []
            for pair in pairs[slot]:
                width = y.shape[1] // len(pairs[slot])
                delta = torch.zeros(num_experts, width, x.shape[1], dtype=torch.float64)
                if pair is not None:
                    delta += pair[1].double() @ pair[0].double()
                parts.append(delta[expert] @ x_row)
            result[row] += factor * torch.cat(parts)
    return result


def build_expert_step(
    *,
    entries: Sequence[Entry],
    num_tokens: int,
    ranks: Sequence[Sequence[int]],
    max_rank: int = 64,
    num_experts: int = 4,
    num_choices: int = 2,
    in_features: int = 24,
    width: int = 12,
    dtype: torch.dtype = torch.float32,
    x_dtype: torch.dtype | None = None,
    y_dtype: torch.dtype | None = None,
    has_row_x: bool = False,
    has_router_weights: bool = False,
    is_a_shared: bool = False,
    is_b_shared: bool = False,
    expert_ids: Tensor | None = None,
    seed: int = 0,
) -> ExpertStep:
    """Build a step of one expert stage; `ranks[slot][slice]`, 0 = absent; slices of one width."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    num_slices = len(ranks[0])
    weights = ExpertWeights.allocate(
        num_slots=len(ranks),
        num_experts=num_experts,
        max_rank=max_rank,
        in_features=in_features,
        out_features=[width] * num_slices,
        dtype=dtype,
        device="cpu",
        is_a_shared=is_a_shared,
        is_b_shared=is_b_shared,
    )
    a_experts, b_experts = (1 if shared else num_experts for shared in (is_a_shared, is_b_shared))
    pairs: list[list[tuple[Tensor, Tensor] | None]] = []
    for slot, by_slice in enumerate(ranks):
        slices: list[tuple[Tensor, Tensor] | None] = []
        for rank in by_slice:
            lora_a = (draw(a_experts, rank, in_features) / math.sqrt(in_features)).to(dtype)
            lora_b = (draw(b_experts, width, rank) / math.sqrt(max(rank, 1))).to(dtype)
            slices.append((lora_a, lora_b) if rank else None)
        weights.write_slot(slot, slices)
        pairs.append(slices)
    num_rows = num_tokens * num_choices
    x = draw(num_rows if has_row_x else num_tokens, in_features).to(x_dtype or dtype)
    y = draw(num_rows, width * num_slices).to(y_dtype or dtype)
    if expert_ids is None:
        chances = torch.rand(num_tokens, max(num_experts, num_choices), generator=generator)
        expert_ids = chances.argsort(1)[:, :num_choices] % num_experts
    router_weights = None
    if has_router_weights:
        router_weights = torch.rand(num_tokens, num_choices, generator=generator)
    routing = build_routing(
        token_idx=[token for token, _, _ in entries],
        slots=[slot for _, slot, _ in entries],
        scales=[scale for _, _, scale in entries],
        num_tokens=num_tokens,
        num_slots=len(ranks),
    )
    return ExpertStep(
        x=x,
        y=y,
        weights=weights,
        routing=routing,
        expert_routing=align_experts(routing, expert_ids, num_experts=num_experts),
        expert_ids=expert_ids,
        router_weights=router_weights,
        pairs=pairs,
        exact=exact_moe(y, x, pairs, entries, expert_ids, router_weights, num_experts),
        reduction=max(in_features, max_rank),
    )


@pytest.fixture
def make_expert_step() -> ExpertStepBuilder:
    return build_expert_step


NATIVE = [Backend.NATIVE] if why_not_native() is None else []
"""Tested where they run; elsewhere everything is done without them."""


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """The tests' products are so small that a second thread only costs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "triton: runs kernels in Triton's interpreter")
    config.addinivalue_line("markers", "ptx: compiles kernels for GPUs, without one")
    config.addinivalue_line("markers", "inductor: compiles C++, minutes on a cold cache")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs an interpreter, a compiler or a GPU, unless `-m` asks for it."""
    asked = config.option.markexpr
    left_out = [name for name in ("triton", "ptx", "inductor", "gpu") if name not in asked]
    chosen: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        (deselected if any(map(item.get_closest_marker, left_out)) else chosen).append(item)
    config.hook.pytest_deselected(items=deselected)
    items[:] = chosen


@pytest.fixture(
    params=[
        Backend.REFERENCE,
        Backend.ATEN,
        *NATIVE,
        pytest.param(Backend.TRITON, marks=pytest.mark.triton),
    ]
)
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend(request.param)


@pytest.fixture
def make_step() -> StepBuilder:
    return build_step


@pytest.fixture
def exact() -> Callable[..., Tensor]:
    return exact_apply


@pytest.fixture
def force_way(monkeypatch: pytest.MonkeyPatch) -> Callable[[Way, int], None]:
    """Take one way through the aten backend, with a dense rank of at most so many."""

    def force(way: Way, dense_rank: int) -> None:
        def choose(*arguments: Any) -> tuple[Way, int]:
            return way, min(dense_rank, max(map(max, arguments[-1])))

        monkeypatch.setattr(plan_module, "_choose", choose)

    return force
