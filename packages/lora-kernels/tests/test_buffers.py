"""RoutingBuffers: one address for every step, and padding that changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.testing import assert_close

from lora_kernels import (
    Backend,
    KernelArgumentError,
    RoutingBuffers,
    apply_lora_,
    build_routing,
    embedding_lora_,
    route_tokens,
)
from lora_kernels.tables import LARGE_TILE, ROW_TILE, SMALL_TILE
from lora_kernels.testing import tolerance

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = [(8, 3), (16, 16), (1, 0), (5, 8)]
CAPTURED = 8


def allocate(**changes: int) -> RoutingBuffers:
    sizes = {"num_tokens": 16, "max_entries": 32, "num_slots": 4} | changes
    return RoutingBuffers.allocate(**sizes, device="cpu")


@pytest.fixture
def step(make_step: Callable[..., Any]) -> Any:
    return make_step(
        entries=[(0, 0, 1.0)], num_tokens=CAPTURED, ranks=RANKS, max_rank=16, widths=(24, 8)
    )


def test_every_step_lies_at_the_same_addresses_and_leaves_nothing_behind() -> None:
    buffers = allocate()
    view = buffers.view(num_tokens=CAPTURED)
    addresses = [tensor.data_ptr() for tensor in view.tables.tensors()]

    buffers.copy_from(route_tokens([1, 1, None, 0, 3, 3, 3, 3], num_slots=4), into=view)
    full = view.tables.entry_slots.tolist()
    buffers.copy_from(route_tokens([2, None], num_slots=4), into=view)

    assert full == [0, 1, 1, 3, 3, 3, 3, -1]
    assert view.tables.entry_slots.tolist() == [2] + [-1] * 7
    assert view.tables.row_indptr.tolist() == [0] + [1] * 8
    assert view.tables.row_tiles_16.tolist() == [[0, 1]] + [[0, 0]] * 7
    assert [tensor.data_ptr() for tensor in view.tables.tensors()] == addresses
    assert [tensor.data_ptr() for tensor in buffers.view(num_tokens=3).tables.tensors()] == (
        addresses
    )


def test_cleared_buffers_are_all_padding() -> None:
    buffers = allocate()
    view = buffers.view(num_tokens=CAPTURED)
    buffers.copy_from(route_tokens([1, 1, 0], num_slots=4), into=view)

    buffers.clear()

    assert set(view.tables.entry_slots.tolist()) == {-1}
    assert not view.tables.row_indptr.any()
    assert not view.tables.entry_tiles_16.any()


@pytest.mark.triton
@pytest.mark.parametrize(
    ("tile", "num_tokens"),
    [
        *((ROW_TILE, n) for n in range(1, CAPTURED + 1)),
        *((tile, n) for tile in (SMALL_TILE, LARGE_TILE) for n in (1, 5, CAPTURED)),
    ],
)
def test_a_padded_step_is_the_step_itself(step: Any, tile: int, num_tokens: int) -> None:
    """C57: sizes around the captured one, adapter steps and base steps in turn."""
    buffers = allocate()
    view = buffers.view(num_tokens=CAPTURED, max_entries=2 * CAPTURED, tile=tile)
    entries = [(t, (3 * t) % 4, 0.5 + t % 2) for t in range(num_tokens)]
    entries += [(t, 1, -0.25) for t in range(0, num_tokens, 3)]
    routing = build_routing(
        token_idx=[t for t, _, _ in entries],
        slots=[s for _, s, _ in entries],
        scales=[scale for _, _, scale in entries],
        num_tokens=num_tokens,
        num_slots=4,
    )

    def replay() -> torch.Tensor:
        return apply_lora_(step.y.clone(), step.x, step.weights, view, backend=Backend.TRITON)

    buffers.copy_from(routing, into=view)
    padded = replay()
    buffers.copy_from(route_tokens([None] * CAPTURED, num_slots=4), into=view)
    base = replay()

    expected = step.y.clone()
    apply_lora_(
        expected[:num_tokens],
        step.x[:num_tokens],
        step.weights,
        routing,
        backend=Backend.REFERENCE,
    )
    within = tolerance(torch.float32, reduction=40)
    assert_close(padded, expected, atol=within.atol, rtol=within.rtol)
    assert torch.equal(padded[num_tokens:], step.y[num_tokens:])
    assert torch.equal(base, step.y)


@pytest.mark.triton
def test_an_adapter_written_after_capture_is_seen_at_the_same_addresses(step: Any) -> None:
    buffers = allocate()
    view = buffers.view(num_tokens=CAPTURED)
    addresses = [t.data_ptr() for t in (step.weights.a_storage, step.weights.slot_table)]
    routing = route_tokens([2, 0, None, 2], num_slots=4)

    step.weights.write_slot(2, [(torch.randn(7, 40), torch.randn(24, 7)), None])
    buffers.copy_from(routing, into=view)
    result = apply_lora_(step.y.clone(), step.x, step.weights, view, backend=Backend.TRITON)

    expected = step.y.clone()
    apply_lora_(expected[:4], step.x[:4], step.weights, routing, backend=Backend.REFERENCE)
    within = tolerance(torch.float32, reduction=40)
    assert_close(result, expected, atol=16 * within.atol, rtol=within.rtol)  # unscaled pair
    assert [t.data_ptr() for t in (step.weights.a_storage, step.weights.slot_table)] == addresses


@pytest.mark.triton
def test_an_embedding_takes_a_padded_step(make_step: Callable[..., Any]) -> None:
    step = make_step(entries=[(0, 0, 1.0)], num_tokens=5, ranks=[(4,), (7,)], in_features=9)
    buffers = allocate(num_slots=2)
    view = buffers.view(num_tokens=5)
    routing = route_tokens([1, None, 0], num_slots=2)
    ids = torch.tensor([8, 99, 0, -1, 5])

    buffers.copy_from(routing, into=view)
    result = embedding_lora_(step.y.clone(), ids, step.weights, view, backend=Backend.TRITON)

    expected = step.y.clone()
    embedding_lora_(expected[:3], ids[:3], step.weights, routing, backend=Backend.REFERENCE)
    within = tolerance(torch.float32, reduction=8)
    assert_close(result, expected, atol=within.atol, rtol=within.rtol)


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.ATEN])
def test_other_backends_refuse_a_padded_routing(step: Any, backend: Backend) -> None:
    view = allocate().view(num_tokens=CAPTURED)

    with pytest.raises(KernelArgumentError, match=f"backend is {backend}, expected triton"):
        apply_lora_(step.y, step.x, step.weights, view, backend=backend)


def test_what_does_not_fit_is_refused_and_the_content_stays() -> None:
    buffers = allocate()
    view = buffers.view(num_tokens=4)
    buffers.copy_from(route_tokens([1, 2], num_slots=4), into=view)
    weighted = build_routing(
        token_idx=[0, 0, 1, 1, 2], slots=[0, 1, 0, 1, 0], num_tokens=3, num_slots=4
    )
    refused = [
        route_tokens([0] * 5, num_slots=4),
        weighted,
        route_tokens([0], num_slots=3),
        route_tokens([0], num_slots=4, device="meta"),
        view,
    ]

    for routing in refused:
        with pytest.raises(KernelArgumentError, match="at most 4 tokens and 4 entries"):
            buffers.copy_from(routing, into=view)

    assert not buffers.fits(weighted, into=view)
    assert buffers.fits(weighted, into=buffers.view(num_tokens=4, max_entries=8))
    assert view.tables.entry_slots.tolist() == [1, 2, -1, -1]


@pytest.mark.parametrize(
    "wrong", [{"num_tokens": 17}, {"num_tokens": 0}, {"max_entries": 33}, {"tile": 8}]
)
def test_views_beyond_the_buffers_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(KernelArgumentError, match=r"expected 1\.\.16, 1\.\.32 and one of"):
        allocate().view(**({"num_tokens": 4} | wrong))


@pytest.mark.parametrize("name", ["num_tokens", "max_entries", "num_slots"])
def test_buffers_without_room_are_refused(name: str) -> None:
    with pytest.raises(KernelArgumentError, match=f"{name}=0"):
        allocate(**{name: 0})
