"""What an expert step must not touch, and what must not matter to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lora_kernels import Backend, ExpertWeights, align_experts, build_routing, moe_lora_
from lora_kernels._aten import moe as aten
from lora_kernels._aten import moe_plan
from lora_kernels.testing import tolerance

if TYPE_CHECKING:
    from collections.abc import Callable

NAN = float("nan")
WAYS = [
    "reference",
    "bags",
    "products",
    "single products",
    pytest.param(1, marks=pytest.mark.triton),
    pytest.param(16, marks=pytest.mark.triton),
]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


@pytest.fixture(params=WAYS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Every way through every backend; a number is Triton's tile."""
    if request.param == "reference":
        return Backend.REFERENCE
    if isinstance(request.param, int):
        from lora_kernels._triton import moe as triton_moe

        monkeypatch.setattr(triton_moe, "_choose_tile", lambda expert_routing: request.param)
        return Backend.TRITON

    def split(groups: list[Any], *arguments: Any) -> tuple[list[Any], list[Any]]:
        return (groups, []) if request.param == "bags" else ([], groups)

    monkeypatch.setattr(aten, "split_bags", split)
    if request.param == "single products":
        monkeypatch.setattr(moe_plan, "MAX_BATCH_ELEMENTS", 1)
    return Backend.ATEN


def run(step: Any, backend: Backend, *, x: Tensor | None = None) -> Tensor:
    return moe_lora_(
        step.y.clone(),
        step.x if x is None else x,
        step.weights,
        step.expert_routing,
        router_weights=step.router_weights,
        backend=backend,
    )


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_without_a_pair_keep_their_bits(
    make_expert_step: Callable[..., Any], backend: Backend, dtype: torch.dtype, gap: int
) -> None:
    # Token 0: base. Token 1: a remote expert and a local one. Token 2: a slot without experts.
    step = make_expert_step(
        entries=[(1, 0, 1.0), (2, 1, 1.0)],
        num_tokens=3,
        ranks=[(4, 8), (0, 0)],
        expert_ids=torch.tensor([[0, 1], [7, 2], [0, 1]]),
        dtype=dtype,
    )
    untouched = [0, 1, 2, 4, 5]
    step.y[untouched, :3] = torch.tensor([-0.0, NAN, -float("inf")], dtype=dtype)
    before = bits(step.y).clone()
    y = torch.empty(6, 24 + gap, dtype=dtype)[:, :24].copy_(step.y)

    result = moe_lora_(y, step.x, step.weights, step.expert_routing, backend=backend)

    assert torch.equal(bits(result)[untouched], before[untouched])
    assert not torch.equal(result[3], step.y[3])


def test_rows_without_a_pair_keep_their_bits_beside_a_weighted_set(
    make_expert_step: Callable[..., Any], backend: Backend
) -> None:
    step = make_expert_step(
        entries=[(1, 0, 0.5), (1, 1, 0.5), (2, 2, 1.0)],
        num_tokens=3,
        ranks=[(4,), (8,), (0,)],
        dtype=torch.bfloat16,
    )
    step.y[[0, 1, 4, 5], :2] = torch.tensor([-0.0, NAN], dtype=torch.bfloat16)
    before = bits(step.y).clone()

    result = run(step, backend)

    assert torch.equal(bits(result)[[0, 1, 4, 5]], before[[0, 1, 4, 5]])
    assert not torch.equal(result[2:4], step.y[2:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_in_slots_experts_and_tokens_that_nothing_names_reaches_no_output(
    make_expert_step: Callable[..., Any], backend: Backend, dtype: torch.dtype
) -> None:
    step = make_expert_step(
        entries=[(t, 2 * (t % 3), 1.0) for t in range(24) if t % 4],
        num_tokens=24,
        ranks=[(8, 4), (8, 8), (3, 8), (8, 8), (8, 8)],
        max_rank=16,
        num_experts=6,
        dtype=dtype,
        expert_ids=torch.arange(48).view(24, 2) % 3 * 2,
    )
    clean = run(step, backend)
    x = step.x.clone()
    x[::4] = NAN
    for a, b in zip(step.weights.lora_a, step.weights.lora_b, strict=True):
        a[[1, 3]] = NAN
        b[[1, 3]] = NAN
        a[:, 1::2] = NAN
        b[:, 1::2] = NAN
        a[:, :, 8:] = NAN
        b[:, :, :, 8:] = NAN
    step.weights.lora_a[0][2, :, 3:] = NAN
    step.weights.lora_b[0][2, :, :, 3:] = NAN

    assert torch.equal(run(step, backend, x=x), clean)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # Triton's interpreter
def test_an_adapter_full_of_nan_spoils_only_its_own_tokens(
    make_expert_step: Callable[..., Any], backend: Backend
) -> None:
    step = make_expert_step(
        entries=[(t, t % 4, 1.0) for t in range(20)], num_tokens=20, ranks=[(8,)] * 4
    )
    clean = run(step, backend)
    step.weights.lora_a[0][1] = NAN
    step.weights.lora_b[0][1] = float("inf")

    spoiled = run(step, backend).view(20, 2, -1)

    others = [t for t in range(20) if t % 4 != 1]
    assert torch.equal(spoiled[others], clean.view(20, 2, -1)[others])
    assert spoiled[1::4].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # Triton's interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_of_nan_spoils_only_its_own_rows(
    make_expert_step: Callable[..., Any], backend: Backend, dtype: torch.dtype
) -> None:
    step = make_expert_step(
        entries=[(t, t % 2, 1.0) for t in range(15)],
        num_tokens=15,
        ranks=[(8,), (8,)],
        dtype=dtype,
    )
    clean = run(step, backend).view(15, 2, -1)
    x = step.x.clone()
    x[6] = NAN

    spoiled = run(step, backend, x=x).view(15, 2, -1)

    others = [t for t in range(15) if t != 6]
    assert torch.equal(spoiled[others], clean[others])
    assert spoiled[6].isnan().all()


def test_permuting_tokens_permutes_outputs(
    make_expert_step: Callable[..., Any], backend: Backend
) -> None:
    entries = [(t, t % 3, 0.5 + t % 2) for t in range(18) if t % 5]
    step = make_expert_step(entries=entries, num_tokens=18, ranks=[(4,), (8,), (6,)])
    order = torch.randperm(18, generator=torch.Generator().manual_seed(3))
    place = order.argsort().tolist()
    routing = build_routing(
        token_idx=[place[token] for token, _, _ in entries],
        slots=[slot for _, slot, _ in entries],
        scales=[scale for _, _, scale in entries],
        num_tokens=18,
        num_slots=3,
    )
    permuted = moe_lora_(
        step.y.view(18, 2, -1)[order].flatten(0, 1),
        step.x[order],
        step.weights,
        align_experts(routing, step.expert_ids[order], num_experts=4),
        backend=backend,
    )

    within = tolerance(torch.float32, reduction=step.reduction)
    expected = run(step, backend).view(18, 2, -1)[order].flatten(0, 1)
    assert_close(permuted, expected, atol=within.atol, rtol=within.rtol)


def test_neighbours_change_nothing(make_expert_step: Callable[..., Any], backend: Backend) -> None:
    step = make_expert_step(
        entries=[(t, t % 3, 1.0) for t in range(18)], num_tokens=18, ranks=[(4,), (8,), (6,)]
    )
    together = run(step, backend).view(18, 2, -1)

    for token in range(18):
        routing = build_routing(token_idx=[0], slots=[token % 3], num_tokens=1, num_slots=3)
        alone = moe_lora_(
            step.y[2 * token : 2 * token + 2].clone(),
            step.x[token : token + 1],
            step.weights,
            align_experts(routing, step.expert_ids[token : token + 1], num_experts=4),
            backend=backend,
        )
        within = tolerance(torch.float32, reduction=step.reduction)
        assert_close(alone, together[token], atol=within.atol, rtol=within.rtol)


def test_a_zero_scale_or_a_zero_b_is_the_base(
    make_expert_step: Callable[..., Any], backend: Backend
) -> None:
    zero_scale = make_expert_step(entries=[(0, 0, 0.0)], num_tokens=2, ranks=[(4,)])
    zero_b = make_expert_step(entries=[(0, 0, 1.0)], num_tokens=2, ranks=[(4,)])
    zero_b.weights.b_storage.zero_()

    assert torch.equal(run(zero_scale, backend), zero_scale.y)
    assert torch.equal(run(zero_b, backend), zero_b.y)


def test_two_entries_on_a_token_are_the_sum_of_each(
    make_expert_step: Callable[..., Any], backend: Backend
) -> None:
    step = make_expert_step(entries=[(0, 0, 0.5), (0, 1, 0.25)], num_tokens=1, ranks=[(4,), (8,)])
    parts = torch.zeros_like(step.y)
    for slot, scale in ((0, 0.5), (1, 0.25)):
        routing = build_routing(
            token_idx=[0], slots=[slot], scales=[scale], num_tokens=1, num_slots=2
        )
        aligned = align_experts(routing, step.expert_ids, num_experts=4)
        parts += moe_lora_(torch.zeros_like(step.y), step.x, step.weights, aligned, backend=backend)

    assert_close(run(step, backend), step.y + parts)


def test_moving_an_adapter_to_another_slot_or_padding_its_rank_changes_nothing(
    make_expert_step: Callable[..., Any], backend: Backend
) -> None:
    step = make_expert_step(entries=[(t, 0, 1.0) for t in range(9)], num_tokens=9, ranks=[(4,)])
    moved = ExpertWeights.allocate(
        num_slots=5,
        num_experts=4,
        max_rank=100,
        in_features=24,
        out_features=(12,),
        dtype=torch.float32,
        device="cpu",
    )
    moved.write_slot(3, step.pairs[0])
    routing = build_routing(token_idx=list(range(9)), slots=[3] * 9, num_tokens=9, num_slots=5)
    aligned = align_experts(routing, step.expert_ids, num_experts=4)

    result = moe_lora_(step.y.clone(), step.x, moved, aligned, backend=backend)

    assert torch.equal(result, run(step, backend))
