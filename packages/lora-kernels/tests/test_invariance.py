"""Batch-invariant mode: a row's bits do not depend on the batch, its order, or other adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from lora_kernels import (
    Backend,
    Routing,
    apply_lora_,
    build_routing,
    embedding_lora_,
    expand_,
    shrink,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RANKS = [(8, 3), (16, 16), (1, 0), (5, 8), (0, 0)]
DTYPES = (torch.float32, torch.bfloat16)
NUM_TOKENS = 45


def sets_of(num_tokens: int) -> list[list[tuple[int, float]]]:
    """(slot, scale) of each token: base, one adapter, scaled, weighted sets, gain and bias."""
    kinds: list[list[tuple[int, float]]] = [
        [(0, 1.0)],
        [],
        [(1, 1.0)],
        [(0, 0.5), (1, 0.25)],
        [(3, 1.0)],
        [(4, 1.0)],
        [(2, -2.0)],
    ]
    return [kinds[(3 * t + t // 9) % len(kinds)] for t in range(num_tokens)]


def route(sets: Sequence[Sequence[tuple[int, float]]]) -> Routing:
    entries = [(t, slot, scale) for t, chosen in enumerate(sets) for slot, scale in chosen]
    return build_routing(
        token_idx=[t for t, _, _ in entries],
        slots=[slot for _, slot, _ in entries],
        scales=[scale for _, _, scale in entries],
        num_tokens=len(sets),
        num_slots=len(RANKS),
    )


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def step(request: pytest.FixtureRequest, make_step: Callable[..., Any]) -> Any:
    step = make_step(
        entries=[(0, 0, 1.0)],
        num_tokens=NUM_TOKENS,
        ranks=RANKS,
        max_rank=16,
        in_features=1100,  # enough columns for shrink to split them
        widths=(72, 9),
        dtype=request.param,
    )
    generator = torch.Generator().manual_seed(7)
    gain, bias = torch.randn(2, 81, generator=generator)
    step.weights.write_slot(4, step.pairs[4], gain=gain, bias=bias)
    step.weights.write_slot(3, step.pairs[3], bias=bias)
    return step


def apply(step: Any, backend: Backend, rows: Sequence[int], *, in_two: bool = False) -> Tensor:
    """Run only these rows of the step, in this order."""
    sets = sets_of(NUM_TOKENS)
    routing = route([sets[row] for row in rows])
    x, y = step.x[rows], step.y[rows]
    if in_two:
        v = shrink(x, step.weights, routing, backend=backend, batch_invariant=True)
        return expand_(y, v, step.weights, routing, backend=backend, batch_invariant=True)
    return apply_lora_(y, x, step.weights, routing, backend=backend, batch_invariant=True)


def test_a_row_has_the_same_bits_alone_and_in_any_company(step: Any, backend: Backend) -> None:
    together = apply(step, backend, range(NUM_TOKENS))

    for rows in ([0], [3], [6, 5], [12, 3, 0], [*range(20, 37)], [*range(5, 42)]):
        assert torch.equal(apply(step, backend, rows), together[rows])


def test_permuting_tokens_permutes_outputs_bit_for_bit(step: Any, backend: Backend) -> None:
    order = torch.randperm(NUM_TOKENS, generator=torch.Generator().manual_seed(1)).tolist()

    together = apply(step, backend, range(NUM_TOKENS))

    assert torch.equal(apply(step, backend, order), together[order])


def test_an_unrelated_adapter_changes_no_bit(step: Any, backend: Backend) -> None:
    without = [t for t, chosen in enumerate(sets_of(NUM_TOKENS)) if 1 not in dict(chosen)]

    together = apply(step, backend, range(NUM_TOKENS))

    assert torch.equal(apply(step, backend, without), together[without])


def test_shrink_and_expand_alone_are_invariant_too(step: Any, backend: Backend) -> None:
    together = apply(step, backend, range(NUM_TOKENS), in_two=True)

    for rows in ([0], [12, 3, 0], [*range(20, 37)]):
        assert torch.equal(apply(step, backend, rows, in_two=True), together[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding_is_invariant(
    make_step: Callable[..., Any], backend: Backend, dtype: torch.dtype
) -> None:
    step = make_step(
        entries=[(0, 0, 1.0)],
        num_tokens=30,
        ranks=[(8,), (16,), (1,), (5,), (0,)],
        max_rank=16,
        in_features=50,
        widths=(33,),
        dtype=dtype,
    )
    sets = sets_of(30)
    ids = torch.arange(30) % 50

    def look_up(rows: Sequence[int]) -> Tensor:
        routing = route([sets[row] for row in rows])
        chosen = ids[torch.tensor(rows)]
        return embedding_lora_(
            step.y[rows], chosen, step.weights, routing, backend=backend, batch_invariant=True
        )

    together = look_up(range(30))

    for rows in ([0], [6, 5], [*range(3, 24)]):
        assert torch.equal(look_up(rows), together[rows])


def test_the_invariant_mode_is_as_exact_as_the_other(
    make_step: Callable[..., Any], backend: Backend
) -> None:
    step = make_step(
        entries=[(t, t % 3, 0.5 + t) for t in range(9)] + [(2, 0, 1.0)],
        num_tokens=10,
        ranks=[(8, 3), (0, 4), (5, 5)],
        widths=(16, 9),
    )

    result = apply_lora_(
        step.y.clone(), step.x, step.weights, step.routing, backend=backend, batch_invariant=True
    )

    torch.testing.assert_close(result.double(), step.exact, atol=2e-5, rtol=1e-6)
