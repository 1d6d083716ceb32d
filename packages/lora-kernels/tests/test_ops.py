"""shrink, expand_ and apply_lora_ against float64, in every backend and on every way."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lora_kernels import Backend, Routing, apply_lora_, expand_, shrink
from lora_kernels._aten.plan import Way
from lora_kernels.testing import Popularity, slots_by_popularity, tolerance

if TYPE_CHECKING:
    from collections.abc import Callable

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WAYS = [
    (Way.BAGS, 64),  # one dense product
    (Way.BAGS, 3),  # a dense product of the first ranks, the rest by segment
    (Way.BAGS, 0),  # products by segment
    (Way.DENSE, 64),
    (Way.SEGMENTS, 0),
    (Way.WIDE, 0),
]


def spread(
    popularity: Popularity, num_tokens: int, num_slots: int, *, base_every: int = 4
) -> list[tuple[int, int, float]]:
    """Entries by popularity, with a token of the base model now and then."""
    slots = slots_by_popularity(
        popularity,
        num_tokens=num_tokens,
        num_slots=num_slots,
        generator=torch.Generator().manual_seed(num_tokens),
    )
    return [(t, slot, 1.0) for t, slot in enumerate(slots) if t % base_every != base_every - 1]


def assert_exact(result: Tensor, step: Any, dtype: torch.dtype) -> None:
    within = tolerance(dtype, reduction=step.reduction)
    assert_close(result.double(), step.exact, atol=within.atol, rtol=within.rtol)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("widths", [(24,), (24, 8, 8), (7, 3), (48, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_equals_float64_over_unequal_ranks_absent_slices_and_scales(
    make_step: Callable[..., Any],
    force_way: Callable[..., None],
    way: tuple[Way, int],
    widths: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    force_way(*way)
    ranks = [[1 + (5 * slot + 3 * p) % 16 for p in range(len(widths))] for slot in range(6)]
    ranks[2] = [0] * len(widths)
    ranks[4][0] = 0
    entries = [(t, (t * 5) % 6, 0.25 + (t % 3) / 4) for t in range(29) if t % 7]
    step = make_step(entries=entries, num_tokens=30, ranks=ranks, widths=widths, dtype=dtype)

    result = apply_lora_(step.y.clone(), step.x, step.weights, step.routing)

    assert_exact(result, step, dtype)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_equals_float64_with_runs_of_tokens(
    make_step: Callable[..., Any], force_way: Callable[..., None], way: tuple[Way, int]
) -> None:
    force_way(*way)
    lengths = [1, 17, 3, 40, 2]
    slots = [slot for slot, length in enumerate(lengths) for _ in range(length)]
    entries = [(t + 1, slot, 1.0) for t, slot in enumerate(slots)]
    step = make_step(entries=entries, num_tokens=len(slots) + 2, ranks=[(8, 8)] * 5, widths=(16, 8))

    result = apply_lora_(step.y.clone(), step.x, step.weights, step.routing)

    assert_exact(result, step, torch.float32)


@pytest.mark.parametrize("num_tokens", [3, 96])
@pytest.mark.parametrize("dtype", FLOATS)
def test_several_entries_of_a_token_add_up(
    make_step: Callable[..., Any], backend: Backend, num_tokens: int, dtype: torch.dtype
) -> None:
    entries = [(t, s, 0.25 * (s + 1)) for t in range(num_tokens) for s in range(4) if (t + s) % 3]
    entries += [(1, 2, -1.0), (1, 2, 0.5)]  # the same slot again
    step = make_step(entries=entries, num_tokens=num_tokens, ranks=[(16,)] * 4, dtype=dtype)

    result = apply_lora_(step.y.clone(), step.x, step.weights, step.routing, backend=backend)

    assert_exact(result, step, dtype)


@pytest.mark.parametrize("num_tokens", [6, 200])
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATS, repeat=3)))
def test_dtypes_may_differ(
    make_step: Callable[..., Any],
    backend: Backend,
    num_tokens: int,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    weight_dtype, x_dtype, y_dtype = dtypes
    step = make_step(
        entries=[(t, t % 3, 1.0) for t in range(num_tokens)],
        num_tokens=num_tokens,
        ranks=[(8, 8)] * 3,
        widths=(16, 8),
        dtype=weight_dtype,
        x_dtype=x_dtype,
        y_dtype=y_dtype,
    )
    # Products are float32 unless both are bfloat16; the inputs' own rounding is in the oracle.
    lowest = torch.bfloat16 if weight_dtype == x_dtype == torch.bfloat16 else y_dtype

    result = apply_lora_(step.y.clone(), step.x, step.weights, step.routing, backend=backend)

    assert result.dtype == y_dtype
    assert_exact(result, step, lowest)


def test_large_float16_values_do_not_overflow_on_the_way(
    make_step: Callable[..., Any], backend: Backend
) -> None:
    step = make_step(
        entries=[(t, 0, 1.0) for t in range(3)], num_tokens=3, ranks=[(4,)], dtype=torch.float16
    )
    step.x.mul_(1e4)
    step.weights.lora_a[0].mul_(100)
    step.weights.lora_b[0].mul_(2**-14)

    result = apply_lora_(step.y.clone(), step.x, step.weights, step.routing, backend=backend)

    assert result.isfinite().all()
    assert (result - step.y).abs().max() > 10


@pytest.mark.parametrize("dtype", FLOATS)
def test_shrink_gives_the_products_in_float32_and_zeros_beyond_the_rank(
    make_step: Callable[..., Any], backend: Backend, dtype: torch.dtype
) -> None:
    step = make_step(
        entries=[(0, 1, 3.0), (2, 0, 1.0), (3, 1, 1.0)],
        num_tokens=4,
        ranks=[(3, 5), (8, 0)],
        max_rank=8,
        widths=(4, 4),
        dtype=dtype,
    )

    v = shrink(step.x, step.weights, step.routing, backend=backend)

    expected = torch.zeros(2, 3, 8, dtype=torch.float64)
    for e, (token, slot) in enumerate([(2, 0), (0, 1), (3, 1)]):
        for p, pair in enumerate(step.pairs[slot]):
            if pair is not None:
                rank = pair[0].shape[0]
                expected[p, e, :rank] = pair[0].double() @ step.x[token].double()
    assert v.dtype == torch.float32
    within = tolerance(torch.float32, reduction=40)
    assert_close(v.double(), expected, atol=within.atol, rtol=within.rtol)


@pytest.mark.parametrize("dtype", FLOATS)
def test_expand_of_shrink_is_apply(
    make_step: Callable[..., Any], backend: Backend, dtype: torch.dtype
) -> None:
    step = make_step(
        entries=[(t, (3 * t) % 4, 1 / (1 + t)) for t in range(6)],
        num_tokens=7,
        ranks=[(3, 5), (8, 0), (1, 1), (0, 0)],
        widths=(6, 4),
        dtype=dtype,
    )

    v = shrink(step.x, step.weights, step.routing, backend=backend)
    result = expand_(step.y.clone(), v, step.weights, step.routing, backend=backend)

    assert_exact(result, step, dtype)


@pytest.mark.parametrize("way", WAYS)
def test_y_may_be_rows_of_a_wider_tensor_and_x_any_view(
    make_step: Callable[..., Any], force_way: Callable[..., None], way: tuple[Way, int]
) -> None:
    force_way(*way)
    step = make_step(entries=spread(Popularity.UNIFORM, 21, 4), num_tokens=21, ranks=[(8,)] * 4)
    wide = torch.full((21, 60), 7.0)
    y = wide[:, 20:44]
    y.copy_(step.y)
    x = step.x.t().contiguous().t()

    result = apply_lora_(y, x, step.weights, step.routing)

    assert result is y
    assert_exact(y, step, torch.float32)
    assert (wide[:, :20] == 7).all()
    assert (wide[:, 44:] == 7).all()


@pytest.mark.parametrize("way", WAYS)
def test_y_may_have_strided_columns(
    make_step: Callable[..., Any], force_way: Callable[..., None], way: tuple[Way, int]
) -> None:
    force_way(*way)
    step = make_step(entries=spread(Popularity.UNIFORM, 9, 4), num_tokens=9, ranks=[(8,)] * 4)
    y = step.y.t().contiguous().t()

    apply_lora_(y, step.x, step.weights, step.routing)

    assert_exact(y, step, torch.float32)


@pytest.mark.parametrize("way", WAYS)
def test_empty_segments_add_nothing(
    make_step: Callable[..., Any], force_way: Callable[..., None], way: tuple[Way, int]
) -> None:
    force_way(*way)
    step = make_step(entries=[(1, 1, 1.0), (2, 1, 1.0)], num_tokens=4, ranks=[(8,)] * 3)
    routing = Routing.from_segments(
        token_idx=torch.tensor([1, 2]),
        scales=torch.ones(2),
        seg_indptr=torch.tensor([0, 0, 2, 2]),
        seg_slots=torch.tensor([0, 1, 2]),
        num_tokens=4,
        num_slots=3,
    )

    result = apply_lora_(step.y.clone(), step.x, step.weights, routing)

    assert_exact(result, step, torch.float32)


def test_no_gradient_is_recorded_and_inference_mode_works(make_step: Callable[..., Any]) -> None:
    step = make_step(entries=[(0, 0, 1.0)], num_tokens=1, ranks=[(4,)])
    y = torch.nn.functional.linear(step.x, torch.zeros(24, 40, requires_grad=True)) + step.y

    apply_lora_(y, step.x.requires_grad_(), step.weights, step.routing)
    with torch.inference_mode():
        again = apply_lora_(step.y.clone(), step.x, step.weights, step.routing)

    assert_exact(y.detach(), step, torch.float32)
    assert torch.equal(again, y)
