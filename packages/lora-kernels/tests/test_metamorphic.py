"""Relations between steps that hold whatever the numbers are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lora_kernels import Backend, Routing, StackedWeights, apply_lora_, build_routing, route_tokens
from lora_kernels.testing import tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RANKS = [(8, 3), (16, 16), (1, 0), (5, 8)]
SIZES = [12, 160]


@pytest.fixture(params=SIZES)
def step(request: pytest.FixtureRequest, make_step: Callable[..., Any]) -> Any:
    entries = [(t, (7 * t) % 4, 1.0) for t in range(request.param) if t % 6]
    return make_step(
        entries=entries, num_tokens=request.param, ranks=RANKS, max_rank=16, widths=(24, 8)
    )


def close(actual: Tensor, expected: Tensor) -> None:
    within = tolerance(torch.float32, reduction=40)
    assert_close(actual, expected, atol=within.atol, rtol=within.rtol)


def route(entries: Sequence[tuple[int, int, float]], like: Any) -> Routing:
    return build_routing(
        token_idx=[t for t, _, _ in entries],
        slots=[s for _, s, _ in entries],
        scales=[scale for _, _, scale in entries],
        num_tokens=like.routing.num_tokens,
        num_slots=like.routing.num_slots,
    )


def copied(
    weights: StackedWeights, *, order: Sequence[int | None], max_rank: int, poison: float = 0.0
) -> StackedWeights:
    """The same adapters in other slots and with another padding."""
    moved = StackedWeights.allocate(
        num_slots=len(order),
        max_rank=max_rank,
        in_features=weights.in_features,
        out_features=weights.out_features,
        dtype=weights.dtype,
        device="cpu",
    )
    for tensor in (moved.a_storage, moved.b_storage):
        tensor.fill_(poison)
    for slot, source in enumerate(order):
        if source is None:
            continue
        ranks = weights.slot_ranks[source]
        moved.write_slot(
            slot,
            [
                (weights.lora_a[p][source, :rank], weights.lora_b[p][source, :, :rank])
                if rank
                else None
                for p, rank in enumerate(ranks)
            ],
        )
    return moved


def test_a_mixed_batch_is_each_adapter_alone(step: Any, backend: Backend) -> None:
    together = apply_lora_(step.y.clone(), step.x, step.weights, step.routing, backend=backend)

    for slot in range(4):
        entries = [entry for entry in step.entries if entry[1] == slot]
        tokens = [t for t, _, _ in entries]
        alone = apply_lora_(
            step.y.clone(), step.x, step.weights, route(entries, step), backend=backend
        )
        close(alone[tokens], together[tokens])


def test_permuting_tokens_permutes_outputs(step: Any, backend: Backend) -> None:
    order = torch.randperm(step.x.shape[0], generator=torch.Generator().manual_seed(1))
    slots = {t: s for t, s, _ in step.entries}
    permuted = route_tokens([slots.get(t) for t in order.tolist()], num_slots=4)

    plain = apply_lora_(step.y.clone(), step.x, step.weights, step.routing, backend=backend)
    moved = apply_lora_(step.y[order], step.x[order], step.weights, permuted, backend=backend)

    close(moved, plain[order])


def test_zero_b_is_the_base_and_so_is_scale_zero(step: Any, backend: Backend) -> None:
    zero = route([(t, s, 0.0) for t, s, _ in step.entries], step)

    scaled = apply_lora_(step.y.clone(), step.x, step.weights, zero, backend=backend)
    step.weights.b_storage.zero_()
    result = apply_lora_(step.y.clone(), step.x, step.weights, step.routing, backend=backend)

    assert torch.equal(result, step.y)
    assert torch.equal(scaled, step.y)


def test_padding_the_rank_changes_nothing(step: Any, backend: Backend) -> None:
    padded = copied(step.weights, order=[0, 1, 2, 3], max_rank=80)

    plain = apply_lora_(step.y.clone(), step.x, step.weights, step.routing, backend=backend)
    result = apply_lora_(step.y.clone(), step.x, padded, step.routing, backend=backend)

    assert torch.equal(result, plain)


def test_moving_adapters_to_other_slots_changes_nothing(step: Any, backend: Backend) -> None:
    order = [None, 2, 0, None, 3, 1, None]
    moved = copied(step.weights, order=order, max_rank=16, poison=float("nan"))
    routing = build_routing(
        token_idx=[t for t, _, _ in step.entries],
        slots=[order.index(s) for _, s, _ in step.entries],
        num_tokens=step.x.shape[0],
        num_slots=len(order),
    )

    plain = apply_lora_(step.y.clone(), step.x, step.weights, step.routing, backend=backend)
    result = apply_lora_(step.y.clone(), step.x, moved, routing, backend=backend)

    close(result, plain)


def test_an_unrelated_adapter_changes_other_rows_within_tolerance(
    step: Any, backend: Backend
) -> None:
    fewer = route([entry for entry in step.entries if entry[1] != 1], step)
    rows = [t for t, s, _ in step.entries if s != 1]

    alone = apply_lora_(step.y.clone(), step.x, step.weights, fewer, backend=backend)
    joined = apply_lora_(step.y.clone(), step.x, step.weights, step.routing, backend=backend)

    close(joined[rows], alone[rows])


def test_two_entries_of_a_token_are_the_sum_of_each_alone(step: Any, backend: Backend) -> None:
    first = [(t, 0, 0.75) for t in range(step.x.shape[0])]
    second = [(t, 3, -0.5) for t in range(step.x.shape[0])]

    both = apply_lora_(
        step.y.clone(), step.x, step.weights, route(first + second, step), backend=backend
    )
    one = apply_lora_(step.y.clone(), step.x, step.weights, route(first, step), backend=backend)
    other = apply_lora_(step.y.clone(), step.x, step.weights, route(second, step), backend=backend)

    close(both - step.y, (one - step.y) + (other - step.y))


def test_two_halves_of_a_scale_are_the_whole(step: Any, backend: Backend) -> None:
    halves = [(t, s, 0.5) for t, s, _ in step.entries] * 2

    whole = apply_lora_(step.y.clone(), step.x, step.weights, step.routing, backend=backend)
    result = apply_lora_(step.y.clone(), step.x, step.weights, route(halves, step), backend=backend)

    close(result, whole)


def test_a_routing_used_before_sees_ranks_written_since(step: Any, backend: Backend) -> None:
    apply_lora_(step.y.clone(), step.x, step.weights, step.routing, backend=backend)
    other = copied(step.weights, order=[1, 3, 0, 2], max_rank=16)
    step.weights.write_slot(0, [(other.lora_a[p][0], other.lora_b[p][0]) for p in range(2)])

    reused = apply_lora_(step.y.clone(), step.x, step.weights, step.routing, backend=backend)
    fresh = apply_lora_(
        step.y.clone(), step.x, step.weights, route(step.entries, step), backend=backend
    )

    assert torch.equal(reused, fresh)
