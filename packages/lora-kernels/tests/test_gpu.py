"""What only a GPU can show: captured graphs, compiled modules, and that nobody waits."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lora_kernels import (
    Backend,
    Routing,
    RoutingBuffers,
    apply_lora_,
    build_routing,
    embedding_lora_,
    route_tokens,
)
from lora_kernels.tables import LARGE_TILE, ROW_TILE, SMALL_TILE
from lora_kernels.testing import tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.gpu

RANKS = [(8, 3), (16, 16), (1, 0), (5, 8)]
CAPTURED = 8


@contextmanager
def forbidden_to_wait() -> Iterator[None]:
    """Any synchronisation of host and device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def step(make_step: Callable[..., Any]) -> Any:
    return make_step(
        entries=[(0, 0, 1.0)],
        num_tokens=CAPTURED,
        ranks=RANKS,
        max_rank=16,
        in_features=2100,
        widths=(72, 9),
        dtype=torch.bfloat16,
        device="cuda",
    )


def route(num_tokens: int, device: str) -> Routing:
    entries = [(t, (3 * t) % 4, 0.5 + t % 2) for t in range(num_tokens)]
    entries += [(t, 1, -0.25) for t in range(0, num_tokens, 3)]
    return build_routing(
        token_idx=[t for t, _, _ in entries],
        slots=[s for _, s, _ in entries],
        scales=[scale for _, _, scale in entries],
        num_tokens=num_tokens,
        num_slots=4,
        device=device,
    )


def apply_reference(step: Any, num_tokens: int) -> Tensor:
    y: Tensor = step.y.clone()
    routing = route(num_tokens, "cuda")
    rows = slice(num_tokens)
    apply_lora_(y[rows], step.x[rows], step.weights, routing, backend=Backend.REFERENCE)
    return y


@pytest.mark.parametrize("tile", [ROW_TILE, SMALL_TILE, LARGE_TILE])
def test_c57_replaying_a_graph_equals_the_eager_step(step: Any, tile: int) -> None:
    buffers = RoutingBuffers.allocate(
        num_tokens=CAPTURED, max_entries=2 * CAPTURED, num_slots=4, device="cuda"
    )
    view = buffers.view(num_tokens=CAPTURED, max_entries=2 * CAPTURED, tile=tile)
    y = step.y.clone()
    apply_lora_(y, step.x, step.weights, view, backend=Backend.TRITON)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        apply_lora_(y, step.x, step.weights, view, backend=Backend.TRITON)
    within = tolerance(torch.bfloat16, reduction=2100)

    for num_tokens in range(1, CAPTURED + 1):
        for routing in (route(num_tokens, "cpu"), route_tokens([None] * CAPTURED, num_slots=4)):
            y.copy_(step.y)
            buffers.copy_from(routing, into=view)
            graph.replay()

            expected = step.y if routing.is_empty else apply_reference(step, num_tokens)
            assert_close(y, expected, atol=within.atol, rtol=within.rtol)
            assert torch.equal(y[num_tokens:], step.y[num_tokens:])


def test_c57_an_adapter_written_after_capture_is_replayed(step: Any) -> None:
    buffers = RoutingBuffers.allocate(
        num_tokens=CAPTURED, max_entries=CAPTURED, num_slots=4, device="cuda"
    )
    view = buffers.view(num_tokens=CAPTURED)
    step.weights.allocate_affine()
    y = step.y.clone()
    apply_lora_(y, step.x, step.weights, view, backend=Backend.TRITON)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        apply_lora_(y, step.x, step.weights, view, backend=Backend.TRITON)

    gain = torch.full((81,), 2.0)
    step.weights.write_slot(2, step.pairs[0], gain=gain)
    y.copy_(step.y)
    buffers.copy_from(route_tokens([2] * CAPTURED, num_slots=4), into=view)
    graph.replay()

    expected = step.y.clone()
    routing = route_tokens([2] * CAPTURED, num_slots=4, device="cuda")
    apply_lora_(expected, step.x, step.weights, routing, backend=Backend.REFERENCE)
    within = tolerance(torch.bfloat16, reduction=2100)
    assert_close(y, expected, atol=2 * within.atol, rtol=within.rtol)


def test_routing_and_operators_never_wait_for_the_device(step: Any) -> None:
    def run() -> None:
        for num_tokens in (1, CAPTURED):
            routing = route(num_tokens, "cuda")
            rows = slice(num_tokens)
            apply_lora_(step.y[rows], step.x[rows], step.weights, routing, backend=Backend.TRITON)

    run()  # compiles, and makes the tables of the weights
    with forbidden_to_wait():
        run()


def test_an_embedding_equals_the_reference(make_step: Callable[..., Any]) -> None:
    step = make_step(
        entries=[(t, t % 3, 1.0 + t % 2) for t in range(0, 60, 2)],
        num_tokens=60,
        ranks=[(8,), (3,), (16,)],
        in_features=101,
        dtype=torch.float16,
        device="cuda",
    )
    ids = (torch.arange(60, device="cuda") * 7) % 101

    results = [
        embedding_lora_(step.y.clone(), ids, step.weights, step.routing, backend=backend)
        for backend in (Backend.TRITON, Backend.REFERENCE)
    ]

    within = tolerance(torch.float16, reduction=16)
    assert_close(*results, atol=within.atol, rtol=within.rtol)


def test_a_module_compiles_for_a_gpu(step: Any) -> None:
    def add(y: Tensor, x: Tensor, routing: Routing) -> Tensor:
        return torch.tanh(apply_lora_(y * 2, x, step.weights, routing, backend=Backend.TRITON))

    compiled = torch.compile(add, fullgraph=True)

    for num_tokens in (3, CAPTURED):
        routing, rows = route(num_tokens, "cuda"), slice(num_tokens)
        within = tolerance(torch.bfloat16, reduction=2100)
        assert_close(
            compiled(step.y[rows], step.x[rows], routing),
            add(step.y[rows], step.x[rows], routing),
            atol=within.atol,
            rtol=within.rtol,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_invariant_mode_keeps_a_rows_bits(
    make_step: Callable[..., Any], dtype: torch.dtype
) -> None:
    step = make_step(
        entries=[(t, (5 * t) % 4, 1.0) for t in range(300)],
        num_tokens=300,
        ranks=RANKS,
        max_rank=16,
        in_features=2100,
        widths=(72, 9),
        dtype=dtype,
        device="cuda",
    )

    def apply(rows: list[int]) -> Tensor:
        routing = route_tokens([(5 * t) % 4 for t in rows], num_slots=4, device="cuda")
        return apply_lora_(
            step.y[rows],
            step.x[rows],
            step.weights,
            routing,
            backend=Backend.TRITON,
            batch_invariant=True,
        )

    together = apply([*range(300)])

    for rows in ([0], [7, 3], [*range(100, 117)], [*range(20, 250)]):
        assert torch.equal(apply(rows), together[rows])
