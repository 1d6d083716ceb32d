"""A step of random data with its exact result, in float64 and without any of the package's code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from lora_kernels import Routing, StackedWeights, build_routing
from lora_kernels._aten import plan as plan_module

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
) -> Step:
    """Build a step; `ranks[slot][slice]`, 0 = absent."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weights = StackedWeights.allocate(
        num_slots=len(ranks),
        max_rank=max_rank,
        in_features=in_features,
        out_features=widths,
        dtype=dtype,
        device="cpu",
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
    )
    return Step(
        x=x,
        y=y,
        weights=weights,
        routing=routing,
        pairs=pairs,
        entries=list(entries),
        exact=exact_apply(y, x, pairs, entries, widths),
        reduction=max(in_features, max_rank),
    )


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """The tests' products are so small that a second thread only costs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
