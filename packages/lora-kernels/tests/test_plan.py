"""Which way the aten backend takes; that all ways give the same is shown in test_ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from lora_kernels import Routing, StackedWeights, build_routing, route_tokens
from lora_kernels._aten.plan import Plan, Way, plan_apply
from lora_kernels.testing import random_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
NAN = float("nan")


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


def plan(
    weights: StackedWeights,
    routing: Routing,
    *,
    x_dtype: torch.dtype = BFLOAT16,
    y_dtype: torch.dtype = BFLOAT16,
) -> Plan:
    y = torch.zeros(routing.num_tokens, weights.total_out_features, dtype=y_dtype)
    x = torch.zeros(routing.num_tokens, weights.in_features, dtype=x_dtype)
    return plan_apply(y, x, weights, routing)


def test_decode_over_all_slots_is_one_dense_product_and_bags() -> None:
    routing = route_tokens([t % 8 for t in range(16)], num_slots=8)

    made = plan(stack([16]), routing)

    assert (made.way, made.dense_rank, made.tails) == (Way.BAGS, 16, ())


def test_a_long_prompt_of_one_adapter_is_products_of_its_own_factors() -> None:
    routing = route_tokens([3] * 512, num_slots=8)

    made = plan(stack([16]), routing)

    assert made.way is Way.SEGMENTS


def test_several_short_prompts_are_products_over_all_slots() -> None:
    routing = route_tokens([t // 64 for t in range(512)], num_slots=8)

    made = plan(stack([16]), routing)

    assert made.way is Way.DENSE


@pytest.mark.parametrize("number", [NAN, float("inf"), -(2.0**100)])
def test_no_product_is_over_all_slots_while_one_holds_numbers_beyond_the_limit(
    number: float,
) -> None:
    weights = stack([16])
    pair = weights.lora_a[0][7, :16].clone(), weights.lora_b[0][7, :, :16].clone()

    def is_dense() -> bool:
        routing = route_tokens([t // 64 for t in range(512)], num_slots=8)
        return plan(weights, routing).way is Way.DENSE

    before = is_dense()
    weights.write_slot(7, [(pair[0], torch.full_like(pair[1], number)), None, None])
    broken = is_dense()
    weights.write_slot(7, [pair, None, None])

    assert (before, broken, is_dense()) == (True, False, True)


def test_few_slots_of_many_are_not_computed_densely() -> None:
    routing = route_tokens([t % 2 for t in range(16)], num_slots=128)

    made = plan(stack([16], num_slots=128), routing)

    assert made.dense_rank == 0


def test_one_large_rank_does_not_make_every_slot_pay_for_it() -> None:
    routing = route_tokens([t % 8 for t in range(16)], num_slots=8)

    made = plan(stack([8] * 7 + [64]), routing)

    assert (made.way, made.dense_rank) == (Way.BAGS, 8)
    assert [(tail.segment.slot, tail.rank) for tail in made.tails] == [(7, 64)]


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

    made = plan(stack([64], dtype=w), routing, x_dtype=x, y_dtype=y)

    assert made.way is Way.WIDE


def test_the_plan_is_made_once_a_step_for_modules_of_one_kind() -> None:
    routing = route_tokens([t % 8 for t in range(16)], num_slots=8)

    first = plan(stack([16]), routing)

    assert plan(stack([16]), routing) is first
    assert plan(stack([8]), routing) is not first


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

    bags = plan(weights, routing, x_dtype=FLOAT32, y_dtype=FLOAT32).bags

    # Chunks of 3: two for the first slice, one for the second. Rank k of slot s, chunk c is piece
    # (2 * k + s) * 3 + c.
    assert bags is not None
    assert bags.starts.tolist() == [0, 3, 6, 7, 7, 7, 9, 9, 9]
    assert bags.rank.tolist() == [0, 1, 2, 0, 1, 2, 0, 0, 1, 0, 1]
    assert bags.slice_idx.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert bags.pieces.tolist() == [0, 6, 12, 1, 7, 13, 2, 5, 11, 5, 11]
