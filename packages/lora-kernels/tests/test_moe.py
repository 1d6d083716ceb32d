"""moe_lora_ against float64 loops over tokens with a matrix for each expert, in every backend."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lora_kernels import (
    Backend,
    ExpertWeights,
    KernelArgumentError,
    RoutingBuffers,
    UnsupportedShapeError,
    align_experts,
    moe_lora_,
    route_tokens,
)
from lora_kernels._aten import moe as aten
from lora_kernels._aten import moe_plan
from lora_kernels.testing import Popularity, slots_by_popularity, tolerance

if TYPE_CHECKING:
    from collections.abc import Callable

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


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


def run(step: Any, backend: Backend = Backend.ATEN) -> Tensor:
    return moe_lora_(
        step.y.clone(),
        step.x,
        step.weights,
        step.expert_routing,
        router_weights=step.router_weights,
        backend=backend,
    )


def assert_exact(result: Tensor, step: Any, dtype: torch.dtype) -> None:
    within = tolerance(dtype, reduction=step.reduction)
    assert_close(result.double(), step.exact, atol=within.atol, rtol=within.rtol)


@pytest.fixture(
    params=[
        "reference",
        "bags",
        "products",
        "single products",
        "split",
        pytest.param(1, marks=pytest.mark.triton),
        pytest.param(16, marks=pytest.mark.triton),
        pytest.param(64, marks=pytest.mark.triton),
    ]
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Take one way through a backend, whatever it costs; a number is Triton's tile."""
    if request.param == "reference":
        return Backend.REFERENCE
    if isinstance(request.param, int):
        from lora_kernels._triton import moe as triton_moe

        monkeypatch.setattr(triton_moe, "_choose_tile", lambda expert_routing: request.param)
        return Backend.TRITON

    def split(groups: list[int], *arguments: Any) -> tuple[list[int], list[int]]:
        if request.param == "bags":
            return groups, []
        return (groups[::2], groups[1::2]) if request.param == "split" else ([], groups)

    monkeypatch.setattr(aten, "split_bags", split)
    if request.param == "single products":
        monkeypatch.setattr(moe_plan, "MAX_BATCH_ELEMENTS", 1)
    return Backend.ATEN


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.ATEN])
@pytest.mark.parametrize("popularity", Popularity)
@pytest.mark.parametrize("num_tokens", [1, 3, 7, 67])
@pytest.mark.parametrize(("rank", "dtype"), list(itertools.product([1, 8, 12, 64], FLOATS)))
def test_moe_equals_float64(  # noqa: PLR0917 - one parameter an axis of the grid
    make_expert_step: Callable[..., Any],
    backend: Backend,
    popularity: Popularity,
    num_tokens: int,
    rank: int,
    dtype: torch.dtype,
) -> None:
    step = make_expert_step(
        entries=spread(popularity, num_tokens, 5),
        num_tokens=num_tokens,
        ranks=[(rank, rank)] * 5,
        in_features=37,
        width=23,
        dtype=dtype,
    )

    assert_exact(run(step, backend), step, dtype)


@pytest.mark.triton
@pytest.mark.parametrize("num_tokens", [1, 7, 33])
@pytest.mark.parametrize(("rank", "dtype"), list(itertools.product([1, 12, 64], FLOATS)))
def test_moe_in_triton_equals_float64(
    make_expert_step: Callable[..., Any], num_tokens: int, rank: int, dtype: torch.dtype
) -> None:
    step = make_expert_step(
        entries=spread(Popularity.ZIPF, num_tokens, 5),
        num_tokens=num_tokens,
        ranks=[(rank, rank)] * 5,
        in_features=37,
        width=23,
        dtype=dtype,
    )

    assert_exact(run(step, Backend.TRITON), step, dtype)


@pytest.mark.parametrize(("num_experts", "num_choices"), [(1, 1), (2, 1), (7, 3), (64, 8)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_any_number_of_experts_and_choices(
    make_expert_step: Callable[..., Any],
    backend: Backend,
    num_experts: int,
    num_choices: int,
    dtype: torch.dtype,
) -> None:
    step = make_expert_step(
        entries=spread(Popularity.UNIFORM, 21, 3),
        num_tokens=21,
        ranks=[(5,), (8,), (3,)],
        num_experts=num_experts,
        num_choices=num_choices,
        dtype=dtype,
    )

    assert_exact(run(step, backend), step, dtype)


@pytest.mark.parametrize("has_row_x", [False, True])
@pytest.mark.parametrize("is_a_shared", [False, True])
@pytest.mark.parametrize("is_b_shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_equals_float64_over_unequal_ranks_absent_slices_scales_and_router_weights(  # noqa: PLR0917 - one parameter an axis of the grid
    make_expert_step: Callable[..., Any],
    way: Backend,
    has_row_x: bool,
    is_a_shared: bool,
    is_b_shared: bool,
    dtype: torch.dtype,
) -> None:
    ranks = [[1 + (5 * slot + 3 * p) % 16 for p in range(2)] for slot in range(6)]
    ranks[2] = [0, 0]
    ranks[4][0] = 0
    step = make_expert_step(
        entries=[(t, (t * 5) % 6, 0.25 + (t % 3) / 4) for t in range(29) if t % 7],
        num_tokens=30,
        ranks=ranks,
        dtype=dtype,
        has_row_x=has_row_x,
        has_router_weights=True,
        is_a_shared=is_a_shared,
        is_b_shared=is_b_shared,
    )

    assert_exact(run(step, way), step, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_several_entries_of_a_token_add_up(
    make_expert_step: Callable[..., Any], way: Backend, dtype: torch.dtype
) -> None:
    entries = [(t, s, 0.25 * (s + 1)) for t in range(17) for s in range(4) if (t + s) % 3]
    entries += [(1, 2, -1.0), (1, 2, 0.5)]  # the same slot again
    step = make_expert_step(
        entries=entries, num_tokens=17, ranks=[(16,), (4,), (8,), (0,)], dtype=dtype
    )

    assert_exact(run(step, way), step, dtype)


@pytest.mark.parametrize(("dtype", "x_dtype", "y_dtype"), list(itertools.product(FLOATS, repeat=3)))
def test_inputs_keep_their_dtypes_in_every_combination(
    make_expert_step: Callable[..., Any],
    backend: Backend,
    dtype: torch.dtype,
    x_dtype: torch.dtype,
    y_dtype: torch.dtype,
) -> None:
    step = make_expert_step(
        entries=spread(Popularity.ZIPF, 19, 3),
        num_tokens=19,
        ranks=[(8, 8), (8, 8), (2, 3)],
        dtype=dtype,
        x_dtype=x_dtype,
        y_dtype=y_dtype,
    )

    result = run(step, backend)

    assert result.dtype == y_dtype
    lowest = max((dtype, x_dtype, y_dtype), key=lambda kind: torch.finfo(kind).eps)
    assert_exact(result, step, lowest)


@pytest.mark.parametrize("num_tokens", [1, 2, 9, 40, 150])
@pytest.mark.parametrize("rank", [4, 8, 128, 256])
def test_small_and_large_ranks_equal_float64_below_and_above_every_switch(
    make_expert_step: Callable[..., Any], backend: Backend, num_tokens: int, rank: int
) -> None:
    step = make_expert_step(
        entries=[(t, t % 2, 1.0) for t in range(num_tokens)],
        num_tokens=num_tokens,
        ranks=[(rank,), (rank,)],
        max_rank=256,
        num_experts=3,
        in_features=64,
        width=32,
        dtype=torch.bfloat16,
    )

    assert_exact(run(step, backend), step, torch.bfloat16)


def test_no_token_is_no_work(make_expert_step: Callable[..., Any], backend: Backend) -> None:
    step = make_expert_step(entries=[], num_tokens=0, ranks=[(4,)])

    assert run(step, backend).shape == (0, 12)


def test_strided_tensors_are_read_and_written_in_place(
    make_expert_step: Callable[..., Any], backend: Backend
) -> None:
    step = make_expert_step(
        entries=[(t, t % 2, 1.0) for t in range(9)],
        num_tokens=9,
        ranks=[(4, 4), (8, 8)],
        has_router_weights=True,
    )
    wide_y = torch.zeros(18, 40)
    y = wide_y[:, 5:29]
    y.copy_(step.y)
    x = step.x.t().contiguous().t()
    router_weights = torch.stack([step.router_weights] * 2, 2)[..., 0]
    expert_ids = step.expert_ids.t().contiguous().t()
    aligned = align_experts(step.routing, expert_ids, num_experts=4)

    result = moe_lora_(y, x, step.weights, aligned, router_weights=router_weights, backend=backend)

    assert result is y
    assert_exact(y, step, torch.float32)
    assert not wide_y[:, :5].any()
    assert not wide_y[:, 29:].any()


def test_router_weights_apply_once_whatever_their_dtype(
    make_expert_step: Callable[..., Any], backend: Backend
) -> None:
    step = make_expert_step(entries=[(0, 0, 2.0), (1, 0, 1.0)], num_tokens=2, ranks=[(4,)])
    router_weights = torch.tensor([[0.5, 0.25], [2.0, 0.0]])
    y = torch.zeros_like(step.y)
    plain = moe_lora_(y.clone(), step.x, step.weights, step.expert_routing, backend=backend)

    for dtype in FLOATS:
        weighted = moe_lora_(
            y.clone(),
            step.x,
            step.weights,
            step.expert_routing,
            router_weights=router_weights.to(dtype),
            backend=backend,
        )
        assert_close(weighted, plain * router_weights.view(-1, 1))


def test_an_expert_chosen_twice_by_a_token_applies_to_both_rows(
    make_expert_step: Callable[..., Any], backend: Backend
) -> None:
    step = make_expert_step(
        entries=[(0, 0, 1.0), (1, 1, 1.0)],
        num_tokens=2,
        ranks=[(4,), (4,)],
        expert_ids=torch.tensor([[2, 2], [1, 1]]),
    )

    assert_exact(run(step, backend), step, torch.float32)


def test_shared_outer_factors_equal_the_expanded_layout(
    make_expert_step: Callable[..., Any], backend: Backend
) -> None:
    step = make_expert_step(
        entries=spread(Popularity.UNIFORM, 23, 3),
        num_tokens=23,
        ranks=[(4,), (8,), (3,)],
        is_a_shared=True,
    )
    expanded = ExpertWeights.allocate(
        num_slots=3,
        num_experts=4,
        max_rank=64,
        in_features=24,
        out_features=(12,),
        dtype=torch.float32,
        device="cpu",
    )
    for slot, slices in enumerate(step.pairs):
        expanded.write_slot(slot, slices)

    whole = moe_lora_(step.y.clone(), step.x, expanded, step.expert_routing, backend=backend)

    within = tolerance(torch.float32, reduction=step.reduction)
    assert_close(run(step, backend), whole, atol=within.atol, rtol=within.rtol)
    assert step.weights.a_storage.nbytes * 4 == expanded.a_storage.nbytes


@pytest.mark.parametrize("bounds", [(0, 4), (0, 1, 4), (0, 1, 2, 3, 4)])
def test_expert_parallel_ranges_sum_to_the_whole(
    make_expert_step: Callable[..., Any], backend: Backend, bounds: tuple[int, ...]
) -> None:
    step = make_expert_step(
        entries=spread(Popularity.UNIFORM, 23, 3),
        num_tokens=23,
        ranks=[(4, 2), (8, 8), (3, 0)],
        has_router_weights=True,
    )
    parts = torch.zeros_like(step.y)
    for low, high in itertools.pairwise(bounds):
        local = ExpertWeights.allocate(
            num_slots=3,
            num_experts=high - low,
            max_rank=8,
            in_features=24,
            out_features=(12, 12),
            dtype=torch.float32,
            device="cpu",
        )
        for slot, slices in enumerate(step.pairs):
            local.write_slot(
                slot, [pair and (pair[0][low:high], pair[1][low:high]) for pair in slices]
            )
        routing = align_experts(
            step.routing, step.expert_ids, num_experts=high - low, expert_offset=low
        )
        part = torch.zeros_like(step.y)
        parts += moe_lora_(
            part, step.x, local, routing, router_weights=step.router_weights, backend=backend
        )

    assert_exact(step.y + parts, step, torch.float32)


def test_a_whole_expert_layer_equals_merged_experts_in_float64(
    make_expert_step: Callable[..., Any], backend: Backend
) -> None:
    num_tokens, hidden, width = 11, 24, 12
    entries = spread(Popularity.UNIFORM, num_tokens, 3)
    first = make_expert_step(
        entries=entries, num_tokens=num_tokens, ranks=[(4, 4), (8, 2), (3, 3)], width=width
    )
    second = make_expert_step(
        entries=entries,
        num_tokens=num_tokens,
        ranks=[(2,), (8,), (5,)],
        in_features=width,
        width=hidden,
        has_row_x=True,
        has_router_weights=True,
        expert_ids=first.expert_ids,
        seed=1,
    )
    ids, router = first.expert_ids, second.router_weights
    w13 = torch.randn(4, 2 * width, hidden) / hidden**0.5
    w2 = torch.randn(4, hidden, width) / width**0.5
    slot_of = {token: slot for token, slot, _ in entries}
    exact = torch.zeros(num_tokens, hidden, dtype=torch.float64)
    for token, k in itertools.product(range(num_tokens), range(2)):
        expert = int(ids[token, k])
        merged13, merged2 = w13[expert].double(), w2[expert].double()
        if (slot := slot_of.get(token)) is not None:
            gate, up = first.pairs[slot]
            (down,) = second.pairs[slot]
            deltas = [b[expert].double() @ a[expert].double() for a, b in (gate, up)]
            merged13 = merged13 + torch.cat(deltas)
            merged2 = merged2 + down[1][expert].double() @ down[0][expert].double()
        gate_out, up_out = (merged13 @ first.x[token].double()).chunk(2)
        activated = torch.nn.functional.silu(gate_out) * up_out
        exact[token] += router[token, k].double() * (merged2 @ activated)

    y13 = torch.einsum("tkoi,ti->tko", w13[ids], first.x).flatten(0, 1)
    moe_lora_(y13, first.x, first.weights, first.expert_routing, backend=backend)
    gate_out, up_out = y13.chunk(2, 1)
    activated = torch.nn.functional.silu(gate_out) * up_out
    y2 = torch.einsum("moi,mi->mo", w2[ids.flatten()], activated) * router.view(-1, 1)
    moe_lora_(
        y2,
        activated,
        second.weights,
        first.expert_routing,
        router_weights=router,
        backend=backend,
    )
    result = y2.view(num_tokens, 2, hidden).sum(1)

    assert_close(result.double(), exact, atol=1e-5, rtol=1e-5)


def test_shapes_that_do_not_fit_are_refused(make_expert_step: Callable[..., Any]) -> None:
    step = make_expert_step(entries=[(0, 0, 1.0)], num_tokens=3, ranks=[(4,)])
    y, x, rest = step.y, step.x, (step.weights, step.expert_routing)

    with pytest.raises(UnsupportedShapeError, match=r"y is \[3, 12\], expected \[6, 12\]"):
        moe_lora_(y[:3], x, *rest)
    with pytest.raises(
        UnsupportedShapeError, match=r"x is \[2, 24\], expected \[3, 24\] or \[6, 24\]"
    ):
        moe_lora_(y, x[:2], *rest)
    with pytest.raises(
        UnsupportedShapeError, match=r"router_weights is \[6, 1\], expected \[3, 2\]"
    ):
        moe_lora_(y, x, *rest, router_weights=torch.ones(6, 1))


def test_dtypes_and_devices_that_do_not_fit_are_refused(
    make_expert_step: Callable[..., Any],
) -> None:
    step = make_expert_step(entries=[(0, 0, 1.0)], num_tokens=3, ranks=[(4,)])
    y, x, rest = step.y, step.x, (step.weights, step.expert_routing)

    with pytest.raises(KernelArgumentError, match=r"x is torch\.float64, expected float32"):
        moe_lora_(y, x.double(), *rest)
    with pytest.raises(KernelArgumentError, match="y is on meta, weights on cpu"):
        moe_lora_(y.to("meta"), x, *rest)
    on_meta = replace(step.expert_routing, pair_idx=step.expert_routing.pair_idx.to("meta"))
    with pytest.raises(KernelArgumentError, match="expert routing is on meta, weights are on cpu"):
        moe_lora_(y, x, step.weights, on_meta)


def test_a_routing_for_other_slots_or_experts_is_refused(
    make_expert_step: Callable[..., Any],
) -> None:
    step = make_expert_step(entries=[(0, 0, 1.0)], num_tokens=3, ranks=[(4,)])
    other_slots = align_experts(
        route_tokens([0, None, None], num_slots=2), step.expert_ids, num_experts=4
    )
    other_experts = align_experts(step.routing, step.expert_ids, num_experts=5)

    for routing, found in ((other_slots, "2 slots and 4"), (other_experts, "1 slots and 5")):
        with pytest.raises(
            KernelArgumentError, match=f"is for {found} experts, weights have 1 and 4"
        ):
            moe_lora_(step.y, step.x, step.weights, routing)


@pytest.mark.triton
@pytest.mark.parametrize("tile", [1, 16])
def test_a_routing_at_fixed_addresses_serves_the_experts_of_step_after_step(
    make_expert_step: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tile: int
) -> None:
    from lora_kernels._triton import moe as triton_moe

    monkeypatch.setattr(triton_moe, "_choose_tile", lambda expert_routing: tile)
    buffers = RoutingBuffers.allocate(num_tokens=6, max_entries=9, num_slots=3, device="cpu")
    view = buffers.view(num_tokens=6, max_entries=9, tile=tile)
    steps: list[list[tuple[int, int, float]]] = [
        [(0, 2, 0.5), (1, 1, 1.0), (4, 2, 1.0)],
        [],
        [(0, 0, 1.0), (0, 1, 0.5), (5, 0, 2.0)],
    ]

    for entries in steps:
        step = make_expert_step(entries=entries, num_tokens=6, ranks=[(4,), (8,), (3,)])
        buffers.copy_from(step.routing, into=view)
        aligned = align_experts(view, step.expert_ids, num_experts=4)
        result = moe_lora_(step.y.clone(), step.x, step.weights, aligned, backend=Backend.TRITON)

        assert_exact(result, step, torch.float32)


def test_a_routing_at_fixed_addresses_is_for_kernels_only(
    make_expert_step: Callable[..., Any],
) -> None:
    step = make_expert_step(entries=[(0, 0, 1.0)], num_tokens=2, ranks=[(4,)])
    buffers = RoutingBuffers.allocate(num_tokens=2, max_entries=2, num_slots=1, device="cpu")
    view = buffers.view(num_tokens=2, max_entries=2, tile=1)
    aligned = align_experts(view, step.expert_ids, num_experts=4)

    with pytest.raises(KernelArgumentError, match="expected triton"):
        moe_lora_(step.y, step.x, step.weights, aligned)
