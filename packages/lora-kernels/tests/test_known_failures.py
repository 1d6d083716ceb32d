"""Failures that other servers had, one test each: the numbers are those of our list of cases.

Where a backend is not named, all of them must be right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from lora_kernels import (
    Backend,
    UnsupportedShapeError,
    apply_lora_,
    build_routing,
    route_runs,
    route_tokens,
)
from lora_kernels.testing import random_pair, random_weights, tolerance

if TYPE_CHECKING:
    from collections.abc import Callable

BASE = None
A, B = 0, 1


def assert_exact(result: Tensor, step: Any, dtype: torch.dtype) -> None:
    within = tolerance(dtype, reduction=step.reduction)
    assert_close(result.double(), step.exact, atol=within.atol, rtol=within.rtol)


@pytest.mark.parametrize("lengths", [(1, 1, 1, 1, 1), (17, 17, 17, 17, 17), (1, 17, 1, 17, 1)])
@pytest.mark.parametrize("requests", [[BASE, A], [A, BASE], [BASE, BASE, A, B, BASE], [BASE]])
def test_c08_base_rows_are_the_base_and_adapter_rows_are_their_solo_run(
    make_step: Callable[..., Any],
    backend: Backend,
    requests: list[int | None],
    lengths: tuple[int, ...],
) -> None:
    slots = [slot for slot, n in zip(requests, lengths, strict=False) for _ in range(n)]
    entries = [(t, slot, 1.0) for t, slot in enumerate(slots) if slot is not None]
    step = make_step(entries=entries, num_tokens=len(slots), ranks=[(8,), (3,)])

    result = apply_lora_(step.y.clone(), step.x, step.weights, step.routing, backend=backend)

    base = [t for t, slot in enumerate(slots) if slot is None]
    assert torch.equal(result[base], step.y[base])
    within = tolerance(torch.float32, reduction=step.reduction)
    for slot in {slot for slot in slots if slot is not None}:
        rows = [t for t, other in enumerate(slots) if other == slot]
        solo = apply_lora_(
            step.y[rows],
            step.x[rows],
            step.weights,
            route_tokens([slot] * len(rows), num_slots=2),
            backend=backend,
        )
        assert_close(result[rows], solo, atol=within.atol, rtol=within.rtol)


@pytest.mark.triton
def test_c08_a_step_without_entries_launches_nothing(
    make_step: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lora_kernels._triton import linear

    def launch(*_: object, **__: object) -> None:
        pytest.fail("launched")

    monkeypatch.setattr(linear, "shrink_splits", launch)
    monkeypatch.setattr(linear, "expand_splits_", launch)
    step = make_step(entries=[], num_tokens=3, ranks=[(8,)])

    assert apply_lora_(step.y, step.x, step.weights, step.routing, backend=Backend.TRITON) is step.y


@pytest.mark.parametrize("length", [1, 15, 16, 17, 127, 128, 129, 400, 1025])
@pytest.mark.parametrize(("rank", "hidden"), [(1, 72), (16, 80), (64, 72)])
def test_c55_prompts_longer_than_a_tile_are_finite_and_right(
    make_step: Callable[..., Any], backend: Backend, length: int, rank: int, hidden: int
) -> None:
    step = make_step(
        entries=[(t, 1, 1.0) for t in range(length)],
        num_tokens=length,
        ranks=[(64,), (rank,), (64,)],
        in_features=hidden,
        widths=(hidden,),
        dtype=torch.bfloat16,
    )
    for tensor in (*step.weights.lora_a, *step.weights.lora_b):
        tensor[[0, 2]] = float("nan")
    wide = torch.full((length, 2 * hidden), float("nan"), dtype=torch.bfloat16)
    x = wide[:, ::2].copy_(step.x)

    # torch fills what it does not initialise with NaN while this is on.
    torch.use_deterministic_algorithms(mode=True)
    try:
        result = apply_lora_(step.y.clone(), x, step.weights, step.routing, backend=backend)
    finally:
        torch.use_deterministic_algorithms(mode=False)

    assert result.isfinite().all()
    assert_exact(result, step, torch.bfloat16)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 7, 8, 12, 16, 24, 31, 32, 33, 64, 128])
def test_c56_every_rank_is_right(
    make_step: Callable[..., Any], backend: Backend, rank: int
) -> None:
    step = make_step(
        entries=[(t, t % 3, 1.0) for t in range(12)],
        num_tokens=12,
        ranks=[(rank,)] * 3,
        max_rank=128,
        in_features=72,
        widths=(80,),
    )

    result = apply_lora_(step.y.clone(), step.x, step.weights, step.routing, backend=backend)

    assert_exact(result, step, torch.float32)


@pytest.mark.parametrize("num_tokens", [6, 60])
def test_c56_ranks_1_8_and_64_share_a_batch(
    make_step: Callable[..., Any], backend: Backend, num_tokens: int
) -> None:
    step = make_step(
        entries=[(t, t % 3, 1.0) for t in range(num_tokens)],
        num_tokens=num_tokens,
        ranks=[(1,), (8,), (64,)],
        dtype=torch.bfloat16,
    )

    result = apply_lora_(step.y.clone(), step.x, step.weights, step.routing, backend=backend)

    assert_exact(result, step, torch.bfloat16)


@pytest.mark.parametrize("num_tokens", [2, 40])
def test_c56_nothing_of_rank_64_remains_under_rank_4(
    make_step: Callable[..., Any], backend: Backend, num_tokens: int
) -> None:
    small = make_step(
        entries=[(t, 0, 1.0) for t in range(num_tokens)], num_tokens=num_tokens, ranks=[(4,)]
    )
    weights = random_weights(
        [64],
        max_rank=64,
        in_features=40,
        out_features=(24,),
        dtype=torch.float32,
        generator=torch.Generator().manual_seed(1),
    )
    apply_lora_(small.y.clone(), small.x, weights, small.routing, backend=backend)

    weights.write_slot(0, small.pairs[0])
    result = apply_lora_(small.y.clone(), small.x, weights, small.routing, backend=backend)

    assert_exact(result, small, torch.float32)


def test_c60_one_function_routes_chunks_samples_and_weighted_sets_of_one_step(
    make_step: Callable[..., Any], backend: Backend
) -> None:
    runs = [
        (37, [(0, 1.0)]),  # a chunk of a prompt
        (1, [(1, 1.0)]),  # n = 2: two rows of one request
        (1, [(1, 1.0)]),
        (1, []),
        (3, [(0, 0.5), (2, 0.25), (0, 0.125)]),  # the same adapter twice
        (0, [(2, 1.0)]),
    ]
    entries, start = [], 0
    for length, pairs in runs:
        entries += [(start + i, slot, scale) for slot, scale in pairs for i in range(length)]
        start += length
    step = make_step(entries=entries, num_tokens=start, ranks=[(8,), (3,), (16,)])
    routing = route_runs(runs, num_slots=3)

    result = apply_lora_(step.y.clone(), step.x, step.weights, routing, backend=backend)

    assert (routing.num_tokens, routing.num_entries) == (43, len(entries))
    assert_exact(result, step, torch.float32)


def test_c60_more_rows_than_the_routing_has_tokens_are_refused(
    make_step: Callable[..., Any], backend: Backend
) -> None:
    step = make_step(entries=[(0, 0, 1.0)], num_tokens=4, ranks=[(8,)])

    with pytest.raises(UnsupportedShapeError, match=r"x is \[4, 40\], expected \[3, 40\]"):
        apply_lora_(
            step.y,
            step.x,
            step.weights,
            route_tokens([0, None, 0], num_slots=1),
            backend=backend,
        )


class FakeQuantized(nn.Module):
    """A linear module whose int8 weights have their input features in another order."""

    def __init__(self, weight: Tensor, order: Tensor) -> None:
        super().__init__()
        self.steps = weight.abs().amax(1, keepdim=True) / 127
        self.codes = (weight / self.steps).round().to(torch.int8)[:, order]
        self.order = order

    def dequantized(self) -> Tensor:
        """The weight with its features in the order of x."""
        return (self.codes * self.steps)[:, self.order.argsort()]

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.order] @ (self.codes * self.steps).t()


def test_c61_the_delta_of_a_quantised_base_comes_from_the_activations_as_they_are(
    backend: Backend,
) -> None:
    generator = torch.Generator().manual_seed(0)
    widths = (24, 8, 8)
    order = torch.randperm(40, generator=generator)
    base = FakeQuantized(torch.randn(sum(widths), 40, generator=generator), order)
    pairs = [random_pair(4, 40, width, generator=generator) for width in widths]
    weights = random_weights(
        [1],
        max_rank=4,
        in_features=40,
        out_features=widths,
        dtype=torch.float32,
        generator=generator,
    )
    weights.write_slot(0, pairs)
    x = torch.randn(6, 40, generator=generator)
    routing = build_routing(token_idx=[*range(6)], slots=[0] * 6, num_tokens=6, num_slots=1)

    before = x.clone()
    result = apply_lora_(base(x), x, weights, routing, backend=backend)

    merged = base.dequantized().double() + torch.cat([b.double() @ a.double() for a, b in pairs])
    within = tolerance(torch.float32, reduction=400)  # sums over values far beyond unit scale
    assert_close(result.double(), x.double() @ merged.t(), atol=within.atol, rtol=within.rtol)
    assert torch.equal(x, before)
