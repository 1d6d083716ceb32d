"""Experts over ranks: tensor parallel, expert parallel, both equal to one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_weights import ExpertPair, ExpertPart
from lora_weights.experts.convert import join_w13, split_w13
from lora_weights.experts.parallel import expert_range, slice_experts
from lora_weights.experts.sharding import shard_experts, shard_w13
from lora_weights.sharding import TensorParallel

if TYPE_CHECKING:
    from collections.abc import Sequence

X, H, F, R = 4, 8, 16, 8


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(wide: int, high: int, *, rank: int = R, experts: int = X, seed: int = 0) -> ExpertPair:
    return ExpertPair(
        lora_a=random(experts, rank, wide, seed=seed),
        lora_b=random(experts, high, rank, seed=seed + 1000),
    )


def part(*, shares_a: bool = False) -> ExpertPart:
    w1, w2, w3 = pair(H, F), pair(F, H, seed=1), pair(H, F, seed=2)
    if shares_a:
        w3 = ExpertPair(lora_a=w1.lora_a, lora_b=w3.lora_b)
    return ExpertPart(w1=w1, w2=w2, w3=w3)


def some(found: ExpertPair | None) -> ExpertPair:
    assert found is not None
    return found


def ranks(size: int, *, is_fully_sharded: bool = False) -> list[TensorParallel]:
    return [
        TensorParallel(size=size, rank=rank, is_fully_sharded=is_fully_sharded)
        for rank in range(size)
    ]


def apply(found: ExpertPair, x: torch.Tensor) -> torch.Tensor:
    """Return the update of every expert on the same tokens, `[X, T, O]`."""
    return x @ found.lora_a.transpose(1, 2) @ found.lora_b.transpose(1, 2)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("shares_a", [False, True])
def test_experts_of_all_ranks_compute_what_one_does(size: int, shares_a: bool) -> None:
    whole, x, inner = part(shares_a=shares_a), random(5, H, seed=3), random(5, F, seed=4)
    shards = [shard_experts(whole, one) for one in ranks(size)]

    for name in ("w1", "w3"):
        found = torch.cat([apply(some(getattr(shard, name)), x) for shard in shards], dim=2)
        assert torch.allclose(found, apply(getattr(whole, name), x), atol=1e-10)
    total = sum(
        (
            apply(some(shard.w2), inner[:, low:high])
            for shard, (low, high) in zip(
                shards, [one.share(F, "columns") for one in ranks(size)], strict=True
            )
        ),
        start=torch.zeros(X, 5, H, dtype=torch.float64),
    )
    assert torch.allclose(total, apply(some(whole.w2), inner), atol=1e-10)
    assert all(shard.has_shared_a is shares_a for shard in shards)


@pytest.mark.parametrize("size", [2, 4])
def test_fully_sharded_experts_gather_or_sum_the_shrunk_activations(size: int) -> None:
    whole, x, inner = part(), random(5, H, seed=3), random(5, F, seed=4)
    group = ranks(size, is_fully_sharded=True)
    shards = [shard_experts(whole, one) for one in group]

    for name in ("w1", "w3"):
        pairs = [some(getattr(shard, name)) for shard in shards]
        shrunk = torch.cat([x @ found.lora_a.transpose(1, 2) for found in pairs], dim=2)
        outputs = [shrunk @ found.lora_b.transpose(1, 2) for found in pairs]
        assert torch.allclose(torch.cat(outputs, dim=2), apply(getattr(whole, name), x), atol=1e-10)
        assert all(found.lora_a.shape[1] == R // size for found in pairs)
    shrunk = torch.zeros(X, 5, R, dtype=torch.float64)
    for one, shard in zip(group, shards, strict=True):
        low, high = one.share(F, "columns")
        shrunk += inner[:, low:high] @ some(shard.w2).lora_a.transpose(1, 2)
    outputs = [shrunk @ some(shard.w2).lora_b.transpose(1, 2) for shard in shards]
    assert torch.allclose(torch.cat(outputs, dim=2), apply(some(whole.w2), inner), atol=1e-10)


@pytest.mark.parametrize("is_fully_sharded", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_fused_w13_is_cut_in_gate_and_up_apart(
    size: int, is_interleaved: bool, is_fully_sharded: bool
) -> None:
    whole = part(shares_a=True)
    fused = join_w13(whole.w1, whole.w3, is_interleaved=is_interleaved)

    shards = [
        shard_w13(fused, one, is_interleaved=is_interleaved)
        for one in ranks(size, is_fully_sharded=is_fully_sharded)
    ]

    halves = [split_w13(shard, is_interleaved=is_interleaved) for shard in shards]
    for index, name in enumerate(("w1", "w3")):
        rows = torch.cat([half[index].lora_b for half in halves], dim=1)
        assert torch.equal(rows, some(getattr(whole, name)).lora_b)
    if is_fully_sharded:
        lora_a = torch.cat([shard.lora_a for shard in shards], dim=1)
        assert torch.equal(lora_a, fused.lora_a)


def test_shared_outer_factors_are_cut_like_the_others() -> None:
    w1 = ExpertPair(lora_a=random(1, R, H), lora_b=random(X, F, R, seed=1))
    w2 = ExpertPair(lora_a=random(X, R, F), lora_b=random(1, H, R, seed=1))

    shards = [shard_experts(ExpertPart(w1=w1, w2=w2), one) for one in ranks(2)]

    assert torch.equal(torch.cat([some(s.w1).lora_b for s in shards], dim=1), w1.lora_b)
    assert torch.equal(torch.cat([some(s.w2).lora_a for s in shards], dim=2), w2.lora_a)
    assert all(some(s.w1).lora_a.shape[0] == some(s.w2).lora_b.shape[0] == 1 for s in shards)


@pytest.mark.parametrize(
    ("found", "match"),
    [
        (ExpertPart(w1=pair(H, 18)), "rows of w1 is 18, expected a multiple of 4"),
        (ExpertPart(w3=pair(H, F, rank=6)), "the rank of w3 is 6, expected a multiple of 4"),
        (ExpertPart(w2=pair(18, H)), "input columns of w2 is 18, expected a multiple of 4"),
        (ExpertPart(w2=pair(F, 10)), "output rows of w2 is 10, expected a multiple of 4"),
    ],
)
def test_expert_sizes_that_do_not_divide_are_errors_with_the_numbers(
    found: ExpertPart, match: str
) -> None:
    parallel = TensorParallel(size=4, rank=0, is_fully_sharded=True)

    with pytest.raises(ValueError, match=match):
        shard_experts(found, parallel)


@given(num_experts=st.integers(1, 40), ep_size=st.integers(1, 8))
def test_expert_ranges_are_contiguous_even_and_complete(num_experts: int, ep_size: int) -> None:
    if num_experts < ep_size:
        with pytest.raises(ValueError, match=f"{num_experts} experts for {ep_size} ranks"):
            expert_range(num_experts, ep_size, 0)
        return

    blocks = [expert_range(num_experts, ep_size, rank) for rank in range(ep_size)]

    assert [expert for block in blocks for expert in block] == list(range(num_experts))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


@pytest.mark.parametrize("ep_rank", [-1, 4])
def test_a_rank_outside_the_expert_group_is_an_error(ep_rank: int) -> None:
    with pytest.raises(ValueError, match=f"ep_rank is {ep_rank}, expected 0 to 3"):
        expert_range(8, 4, ep_rank)


@pytest.mark.parametrize("shares_a", [False, True])
@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 1, 1, 1)])
def test_expert_parallel_slices_put_together_are_the_whole(
    sizes: Sequence[int], shares_a: bool
) -> None:
    whole = part(shares_a=shares_a)
    blocks = [expert_range(X, len(sizes), rank) for rank in range(len(sizes))]

    slices = [slice_experts(whole, block) for block in blocks]

    for name in ("w1", "w2", "w3"):
        pairs = [some(getattr(one, name)) for one in slices]
        wanted = some(getattr(whole, name))
        assert torch.equal(torch.cat([found.lora_a for found in pairs]), wanted.lora_a)
        assert torch.equal(torch.cat([found.lora_b for found in pairs]), wanted.lora_b)
    assert all(one.has_shared_a is shares_a for one in slices)
    assert [len(block) for block in blocks] == list(sizes)


def test_shared_factors_stay_whole_in_a_slice_and_too_few_experts_are_an_error() -> None:
    shared = ExpertPair(lora_a=random(1, R, H), lora_b=random(X, F, R))

    found = slice_experts(ExpertPart(w1=shared), range(1, 3))

    assert some(found.w1).lora_a is shared.lora_a
    assert some(found.w1).lora_b.shape[0] == 2
    with pytest.raises(ValueError, match="experts 3 to 4 of a pair that has 4"):
        slice_experts(ExpertPart(w1=shared), range(3, 5))
