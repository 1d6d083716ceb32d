"""Expert layouts: every conversion keeps each expert's update, and has an inverse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_weights import ExpertPair, ExpertPart, ExpertShape, LoraPair
from lora_weights.experts.convert import (
    expand_factor,
    flatten_a,
    flatten_b,
    join_w13,
    reverse_pair,
    share_factor,
    split_w13,
    stack_experts,
    unflatten_a,
    unflatten_b,
    unstack_experts,
)
from lora_weights.experts.layouts import to_parameters, to_per_expert
from lora_weights.experts.shared import expand_outer, has_shared_outer, share_outer

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZES = st.integers(1, 5)
SEEDS = st.integers(0, 99)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(experts: int, rank: int, wide: int, high: int, seed: int = 0) -> ExpertPair:
    return ExpertPair(
        lora_a=random(experts, rank, wide, seed=seed),
        lora_b=random(experts, high, rank, seed=seed + 1000),
    )


def delta(found: ExpertPair) -> torch.Tensor:
    """Return each expert's update, `[X, O, I]`."""
    return found.lora_b @ found.lora_a


def same(first: ExpertPair | None, second: ExpertPair | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first.lora_a, second.lora_a) and torch.equal(first.lora_b, second.lora_b)


@given(experts=SIZES, rank=SIZES, wide=SIZES, high=SIZES, seed=SEEDS)
def test_flat_matrices_hold_what_peft_computes_from_them(
    experts: int, rank: int, wide: int, high: int, seed: int
) -> None:
    whole = pair(experts, rank, wide, high, seed)

    flat_a, flat_b = flatten_a(whole.lora_a), flatten_b(whole.lora_b)

    # ParamWrapper.get_delta_weight of PEFT, spelled as its documentation spells it.
    ours_a = flat_a.reshape(experts, -1, wide)
    ours_b = flat_b.reshape(high, -1, experts)
    assert torch.allclose(torch.einsum("ore,eri->eoi", ours_b, ours_a), delta(whole), atol=1e-12)
    assert flat_a.shape == (experts * rank, wide)
    assert flat_b.shape == (high, rank * experts)


@given(experts=SIZES, rank=SIZES, wide=SIZES, high=SIZES, seed=SEEDS)
def test_flattening_and_unflattening_are_inverse(
    experts: int, rank: int, wide: int, high: int, seed: int
) -> None:
    whole = pair(experts, rank, wide, high, seed)

    assert torch.equal(unflatten_a(flatten_a(whole.lora_a), experts), whole.lora_a)
    assert torch.equal(unflatten_b(flatten_b(whole.lora_b), experts), whole.lora_b)
    flat_a, flat_b = random(experts * rank, wide), random(high, rank * experts)
    assert torch.equal(flatten_a(unflatten_a(flat_a, experts)), flat_a)
    assert torch.equal(flatten_b(unflatten_b(flat_b, experts)), flat_b)


def test_rows_that_do_not_divide_by_the_experts_are_an_error_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="9 rows of lora_A, expected a multiple of 4"):
        unflatten_a(torch.zeros(9, 3), 4)
    with pytest.raises(ValueError, match="6 columns of lora_B, expected a multiple of 4"):
        unflatten_b(torch.zeros(3, 6), 4)


def test_a_reversed_pair_is_the_transposed_update() -> None:
    whole = pair(3, 2, 5, 4)

    assert torch.allclose(delta(reverse_pair(whole)), delta(whole).transpose(1, 2))
    assert same(reverse_pair(reverse_pair(whole)), whole)


@given(half=SIZES, rank=SIZES, experts=SIZES, is_interleaved=st.booleans(), seed=SEEDS)
def test_splitting_and_joining_w13_are_inverse(
    half: int, rank: int, experts: int, is_interleaved: bool, seed: int
) -> None:
    fused = pair(experts, rank, 3, 2 * half, seed)

    w1, w3 = split_w13(fused, is_interleaved=is_interleaved)
    joined = join_w13(w1, w3, is_interleaved=is_interleaved)

    whole = delta(fused)
    gate, up = (
        (whole[:, 0::2], whole[:, 1::2]) if is_interleaved else (whole[:, :half], whole[:, half:])
    )
    assert w1.lora_a is w3.lora_a
    assert torch.allclose(delta(w1), gate, atol=1e-12)
    assert torch.allclose(delta(w3), up, atol=1e-12)
    assert same(joined, fused)


@given(half=SIZES, ranks=st.tuples(SIZES, SIZES), is_interleaved=st.booleans(), seed=SEEDS)
def test_joining_pairs_of_their_own_a_keeps_both_updates(
    half: int, ranks: tuple[int, int], is_interleaved: bool, seed: int
) -> None:
    w1, w3 = (pair(2, rank, 3, half, seed + rank) for rank in ranks)

    joined = join_w13(w1, w3, is_interleaved=is_interleaved)

    assert joined.rank == sum(ranks)
    again = split_w13(joined, is_interleaved=is_interleaved)
    assert torch.allclose(delta(again[0]), delta(w1), atol=1e-12)
    assert torch.allclose(delta(again[1]), delta(w3), atol=1e-12)


@pytest.mark.parametrize("absent", ["w1", "w3"])
def test_an_absent_half_of_w13_is_zero(absent: str) -> None:
    there = pair(2, 2, 3, 4)
    halves = {"w1": None if absent == "w1" else there, "w3": None if absent == "w3" else there}

    joined = join_w13(halves["w1"], halves["w3"], is_interleaved=True)

    found = dict(zip(("w1", "w3"), split_w13(joined, is_interleaved=True), strict=True))
    assert not delta(found[absent]).any()
    assert all(torch.equal(delta(found[key]), delta(there)) for key in found if key != absent)


def test_a_shared_factor_joins_one_of_every_expert() -> None:
    w1, w3 = pair(1, 2, 3, 4), pair(3, 2, 3, 4, seed=5)

    joined = join_w13(w1, w3, is_interleaved=False)

    first, second = split_w13(joined, is_interleaved=False)
    assert torch.allclose(delta(first), delta(w1).expand(3, 4, 3), atol=1e-12)
    assert torch.allclose(delta(second), delta(w3), atol=1e-12)


def test_w13_with_nothing_odd_rows_or_two_sizes_is_an_error() -> None:
    with pytest.raises(ValueError, match="5 rows of fused gate and up, expected a multiple of 2"):
        split_w13(pair(2, 1, 3, 5), is_interleaved=True)
    with pytest.raises(ValueError, match="neither w1 nor w3"):
        join_w13(None, None, is_interleaved=False)
    with pytest.raises(ValueError, match="w1 is 3 -> 4 and w3 is 3 -> 5"):
        join_w13(pair(2, 1, 3, 4), pair(2, 1, 3, 5), is_interleaved=False)


@given(
    ranks=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any), wide=SIZES, high=SIZES
)
def test_unequal_ranks_are_padded_exactly_and_absent_experts_are_zero(
    ranks: Sequence[int], wide: int, high: int
) -> None:
    pairs = [
        LoraPair(lora_a=random(rank, wide, seed=rank), lora_b=random(high, rank, seed=9 + rank))
        if rank
        else None
        for rank in ranks
    ]

    stacked = stack_experts(pairs)

    assert stacked.lora_a.shape == (len(ranks), max(ranks), wide)
    for found, single in zip(delta(stacked), pairs, strict=True):
        wanted = torch.zeros_like(found) if single is None else single.lora_b @ single.lora_a
        assert torch.allclose(found, wanted, atol=1e-12)


def test_experts_of_two_sizes_cannot_be_stacked() -> None:
    pairs = [LoraPair(lora_a=torch.zeros(1, width), lora_b=torch.zeros(2, 1)) for width in (3, 4)]

    with pytest.raises(ValueError, match="sizes 3 -> 2, 4 -> 2, expected one size"):
        stack_experts(pairs)
    with pytest.raises(ValueError, match="sizes none"):
        stack_experts([None])


def test_experts_of_two_types_are_stacked_in_one_that_holds_both() -> None:
    kinds = (torch.float16, torch.bfloat16)
    pairs = [
        LoraPair(lora_a=torch.full((1, 2), 0.5, dtype=kind), lora_b=torch.ones(2, 1, dtype=kind))
        for kind in kinds
    ]

    assert stack_experts(pairs).lora_a.dtype == torch.float32


@given(experts=SIZES, rank=SIZES, seed=SEEDS)
def test_stacking_and_unstacking_are_inverse(experts: int, rank: int, seed: int) -> None:
    whole = pair(experts, rank, 3, 4, seed)

    assert same(stack_experts(unstack_experts(whole, experts)), whole)


def gated(
    experts: int, *, shares_a: bool, ranks: tuple[int, int, int], seed: int
) -> tuple[ExpertPart, ExpertShape]:
    shape = ExpertShape(num_experts=experts, hidden_size=3, intermediate_size=4)
    w1 = pair(experts, ranks[0], 3, 4, seed)
    w3 = pair(experts, ranks[1], 3, 4, seed + 1)
    if shares_a:
        lora_b = random(experts, 4, ranks[0], seed=seed + 2)
        w3 = ExpertPair(lora_a=w1.lora_a, lora_b=lora_b)
    return ExpertPart(w1=w1, w2=pair(experts, ranks[2], 4, 3, seed + 3), w3=w3), shape


@given(
    experts=SIZES,
    shares_a=st.booleans(),
    ranks=st.tuples(SIZES, SIZES, SIZES),
    is_interleaved=st.booleans(),
    seed=SEEDS,
)
@settings(max_examples=50)
def test_2d_and_3d_files_of_one_part_have_the_same_update(
    experts: int, shares_a: bool, ranks: tuple[int, int, int], is_interleaved: bool, seed: int
) -> None:
    part, plain = gated(experts, shares_a=shares_a, ranks=ranks, seed=seed)
    shape = ExpertShape(
        num_experts=experts,
        hidden_size=plain.hidden_size,
        intermediate_size=plain.intermediate_size,
        is_interleaved=is_interleaved,
    )

    flat, single = to_parameters(part, shape), to_per_expert(part, shape)

    fused = ExpertPair(
        lora_a=unflatten_a(flat["gate_up_proj"].lora_a, experts),
        lora_b=unflatten_b(flat["gate_up_proj"].lora_b, experts),
    )
    halves = split_w13(fused, is_interleaved=is_interleaved)
    for name, half in zip(("gate_proj", "up_proj"), halves, strict=True):
        stacked = stack_experts([single[f"{expert}.{name}"] for expert in range(experts)])
        assert torch.allclose(delta(half), delta(stacked), atol=1e-12)
    down = stack_experts([single[f"{expert}.down_proj"] for expert in range(experts)])
    assert part.w2 is not None
    assert same(down, part.w2)
    assert torch.equal(unflatten_b(flat["down_proj"].lora_b, experts), part.w2.lora_b)


def test_experts_without_a_gate_are_written_as_up_and_down() -> None:
    shape = ExpertShape(num_experts=2, hidden_size=3, intermediate_size=4, is_gated=False)
    part = ExpertPart(w1=pair(2, 1, 3, 4), w2=pair(2, 2, 4, 3))

    assert sorted(to_parameters(part, shape)) == ["down_proj", "up_proj"]
    assert sorted(to_per_expert(part, shape)) == [
        "0.down_proj",
        "0.up_proj",
        "1.down_proj",
        "1.up_proj",
    ]


def test_absent_pairs_are_not_written() -> None:
    shape = ExpertShape(num_experts=2, hidden_size=3, intermediate_size=4)

    assert list(to_parameters(ExpertPart(w2=pair(2, 1, 4, 3)), shape)) == ["down_proj"]
    assert to_per_expert(ExpertPart(), shape) == {}


@given(experts=SIZES, shares_a=st.booleans(), ranks=st.tuples(SIZES, SIZES, SIZES), seed=SEEDS)
@settings(max_examples=50)
def test_sharing_and_expanding_the_outer_factors_are_inverse(
    experts: int, shares_a: bool, ranks: tuple[int, int, int], seed: int
) -> None:
    whole, _ = gated(experts, shares_a=shares_a, ranks=ranks, seed=seed)
    outer = whole.map_pairs(
        lambda name, pair: (
            ExpertPair(lora_a=pair.lora_a, lora_b=pair.lora_b[:1])
            if name == "w2"
            else ExpertPair(lora_a=pair.lora_a[:1], lora_b=pair.lora_b)
        )
    )

    expanded = expand_outer(outer, experts)
    again = share_outer(expanded)

    assert has_shared_outer(outer)
    assert has_shared_outer(again)
    assert has_shared_outer(expanded) is (experts == 1)
    for name in ("w1", "w2", "w3"):
        assert same(getattr(again, name), getattr(outer, name))
        factors = getattr(expanded, name)
        assert factors.lora_a.shape[0] == factors.lora_b.shape[0] == experts
    assert again.has_shared_a is expanded.has_shared_a is shares_a
    assert expanded.w1 is not None
    assert experts == 1 or expanded.w1.lora_a.stride(0) == 0


@pytest.mark.parametrize("name", ["w1", "w2", "w3"])
def test_experts_that_differ_in_an_outer_factor_cannot_share_it(name: str) -> None:
    part = ExpertPart(**{name: pair(3, 2, 4, 4)})

    with pytest.raises(ValueError, match=rf"of {name} differs between experts"):
        share_outer(part)


def test_a_factor_of_another_number_of_experts_cannot_be_expanded() -> None:
    with pytest.raises(ValueError, match="a factor of 3 experts, expected 1 or 4"):
        expand_factor(torch.zeros(3, 1, 1), 4)
    assert share_factor(torch.ones(3, 1, 1)) is not None
    assert not has_shared_outer(ExpertPart())
