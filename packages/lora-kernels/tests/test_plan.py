"""Which way the aten backend takes; that all ways give the same is shown in test_ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from lora_kernels import StackedWeights, build_routing, route_tokens
from lora_kernels._aten.plan import Way, plan_apply
from lora_kernels.testing import random_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def stack(
    ranks: Sequence[Any], *, num_slots: int = 8, dtype: torch.dtype = BFLOAT16, max_rank: int = 64
) -> StackedWeights:
    return random_weights(
        (list(ranks) * num_slots)[:num_slots],
        max_rank=max_rank,
        in_features=576,
        out_features=(576, 192, 192),
        dtype=dtype,
        generator=torch.Generator().manual_seed(0),
    )


def test_decode_over_all_slots_is_one_dense_product_and_bags() -> None:
    routing = route_tokens([t % 8 for t in range(16)], num_slots=8)

    plan = plan_apply(BFLOAT16, BFLOAT16, stack([16]), routing)

    assert (plan.way, plan.dense_rank, plan.tails) == (Way.BAGS, 16, ())


def test_a_long_prompt_of_one_adapter_is_products_of_its_own_factors() -> None:
    routing = route_tokens([3] * 512, num_slots=8)

    plan = plan_apply(BFLOAT16, BFLOAT16, stack([16]), routing)

    assert plan.way is Way.SEGMENTS


def test_few_slots_of_many_are_not_computed_densely() -> None:
    routing = route_tokens([t % 2 for t in range(16)], num_slots=128)

    plan = plan_apply(BFLOAT16, BFLOAT16, stack([16], num_slots=128), routing)

    assert plan.dense_rank == 0


def test_one_large_rank_does_not_make_every_slot_pay_for_it() -> None:
    routing = route_tokens([t % 8 for t in range(16)], num_slots=8)

    plan = plan_apply(BFLOAT16, BFLOAT16, stack([8] * 7 + [64]), routing)

    assert (plan.way, plan.dense_rank) == (Way.BAGS, 8)
    assert [(tail.segment.slot, tail.rank) for tail in plan.tails] == [(7, 64)]


@pytest.mark.parametrize(
    ("x", "w", "y"), [(FLOAT32, BFLOAT16, FLOAT32), (torch.float16,) * 3, (BFLOAT16,) * 3]
)
def test_long_steps_with_other_dtypes_or_repeated_tokens_go_through_float32(
    x: torch.dtype, w: torch.dtype, y: torch.dtype
) -> None:
    tokens = [*range(600), *range(600)]
    routing = build_routing(
        token_idx=tokens, slots=[0] * 600 + [1] * 600, num_tokens=600, num_slots=8
    )

    plan = plan_apply(x, y, stack([64], dtype=w), routing)

    assert plan.way is Way.WIDE


def test_the_plan_is_made_once_a_step_for_modules_of_one_kind() -> None:
    routing = route_tokens([t % 8 for t in range(16)], num_slots=8)

    first = plan_apply(BFLOAT16, BFLOAT16, stack([16]), routing)

    assert plan_apply(BFLOAT16, BFLOAT16, stack([16]), routing) is first
    assert plan_apply(BFLOAT16, BFLOAT16, stack([8]), routing) is not first


def test_bags_hold_the_true_ranks_only() -> None:
    routing = route_tokens([0, None, 1, 1], num_slots=2)
    weights = random_weights(
        [(3, 1), (0, 2)],
        max_rank=4,
        in_features=8,
        out_features=(6, 3),
        dtype=FLOAT32,
        generator=torch.Generator().manual_seed(0),
    )

    bags = plan_apply(FLOAT32, FLOAT32, weights, routing).bags

    # Chunks of 3: two for the first slice, one for the second.
    assert bags is not None
    assert bags.starts.tolist() == [0, 3, 6, 7, 7, 7, 9, 9, 9]
    assert bags.rank.tolist() == [0, 1, 2, 0, 1, 2, 0, 0, 1, 0, 1]
    assert bags.slice_idx.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert bags.pieces.tolist() == [0, 3, 6, 1, 4, 7, 2, 14, 17, 14, 17]
