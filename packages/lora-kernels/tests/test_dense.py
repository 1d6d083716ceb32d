"""Products over all slots: one slot's numbers reach no other's tokens, and calls repeat rightly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lora_kernels import KernelArgumentError, UnsupportedShapeError, apply_lora_
from lora_kernels._aten import linear
from lora_kernels._aten import plan as plan_module
from lora_kernels._aten.plan import Way, known_plan
from lora_kernels.testing import tolerance

if TYPE_CHECKING:
    from collections.abc import Callable

NAN = float("nan")
SLOTS = [0, 1, 2, 4, 5]


@pytest.fixture
def step(make_step: Callable[..., Any]) -> Any:
    """Five of six slots named in turn, in float32."""
    entries = [(t, SLOTS[t % 5], 1.0) for t in range(160) if t % 8]
    ranks = [(8, 8), (8, 4), (3, 8), (8, 8), (0, 8), (8, 8)]
    return make_step(
        entries=entries, num_tokens=160, ranks=ranks, in_features=256, widths=(160, 160)
    )


@pytest.fixture
def dense_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make products over all slots the cheapest way, where they are allowed at all."""
    monkeypatch.setattr(plan_module, "_dense_cost", lambda *_: 0.0)


def run(step: Any) -> Tensor:
    return apply_lora_(step.y.clone(), step.x, step.weights, step.routing)


def way_of(step: Any) -> Way:
    plan = known_plan(step.y, step.x, step.weights, step.routing)
    assert plan is not None
    return plan.way


def close(actual: Tensor, expected: Tensor) -> None:
    within = tolerance(torch.float32, reduction=256)
    assert_close(actual, expected, atol=within.atol, rtol=within.rtol)


@pytest.mark.usefixtures("dense_costs")
@pytest.mark.parametrize("number", [NAN, float("inf"), 1e38])
def test_a_slot_that_no_entry_names_reaches_no_output(step: Any, number: float) -> None:
    clean = run(step)
    assert way_of(step) is Way.DENSE
    broken = torch.full((8, 256), number), torch.full((160, 8), number)

    step.weights.write_slot(3, [broken, broken])

    close(run(step), clean)


@pytest.mark.usefixtures("dense_costs")
def test_numbers_written_past_write_slot_reach_no_output_either(step: Any) -> None:
    clean = run(step)

    for factor in (*step.weights.lora_a, *step.weights.lora_b):
        factor[3] = NAN

    close(run(step), clean)


@pytest.mark.usefixtures("dense_costs")
@pytest.mark.parametrize("number", [NAN, float("inf"), 1e38])
def test_a_broken_adapter_spoils_only_its_own_tokens(step: Any, number: float) -> None:
    clean = run(step)
    broken = torch.full((8, 256), number), torch.full((160, 8), number)

    step.weights.write_slot(1, [broken, broken])
    spoiled = run(step)

    others = [t for t in range(160) if t % 8 == 0 or SLOTS[t % 5] != 1]
    own = [t for t in range(160) if t % 8 and SLOTS[t % 5] == 1]
    close(spoiled[others], clean[others])
    assert not spoiled[own].isfinite().all(1).any()


@pytest.mark.usefixtures("dense_costs")
def test_a_token_whose_activations_are_nan_spoils_only_itself(step: Any) -> None:
    clean = run(step)
    step.x[[8, 9]] = NAN  # a token of the base model, and one of an adapter

    spoiled = run(step)

    others = [t for t in range(160) if t != 9]
    assert torch.equal(spoiled[others], clean[others])
    assert spoiled[9].isnan().all()


@pytest.mark.usefixtures("dense_costs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_and_several_entries_of_a_token_are_in_the_mask(
    make_step: Callable[..., Any], dtype: torch.dtype
) -> None:
    entries = [(t, s, 0.7 - 0.3 * s) for t in range(24) for s in range(3) if (t + s) % 4]
    entries += [(5, 1, 0.3), (5, 1, 0.1)]  # the same slot again
    step = make_step(
        entries=entries, num_tokens=25, ranks=[(8, 8), (4, 8), (8, 3)], widths=(24, 8), dtype=dtype
    )

    result = run(step)

    assert way_of(step) is Way.DENSE
    within = tolerance(dtype, reduction=step.reduction)
    assert_close(result.double(), step.exact, atol=within.atol, rtol=within.rtol)


def test_a_second_call_is_checked_where_it_differs(step: Any) -> None:
    with torch.inference_mode():
        run(step)
        assert linear.apply_lora_again_(step.y.clone(), step.x, step.weights, step.routing)

        with pytest.raises(UnsupportedShapeError, match="x is"):
            apply_lora_(step.y, step.x[:, :-1], step.weights, step.routing)
        with pytest.raises(UnsupportedShapeError, match="y is"):
            apply_lora_(step.y[1:], step.x, step.weights, step.routing)
        with pytest.raises(KernelArgumentError, match="x is on meta"):
            apply_lora_(step.y, step.x.to("meta"), step.weights, step.routing)
        with pytest.raises(KernelArgumentError, match=r"torch\.float64"):
            apply_lora_(step.y, step.x.double(), step.weights, step.routing)


def test_a_second_call_is_not_taken_for_the_first_after_a_slot_was_written(step: Any) -> None:
    with torch.inference_mode():
        run(step)
        other = torch.ones(2, 256) / 256, torch.ones(160, 2)
        step.weights.write_slot(0, [other, None])

        assert not linear.apply_lora_again_(step.y.clone(), step.x, step.weights, step.routing)
        result = run(step)

    rows = [t for t in range(160) if t % 8 and SLOTS[t % 5] == 0]
    expected = step.y[rows, :160] + 2 * step.x[rows].mean(1, keepdim=True)
    close(result[rows, :160], expected)
    assert torch.equal(result[rows, 160:], step.y[rows, 160:])


def test_a_second_call_records_no_gradient(step: Any) -> None:
    run(step)
    y = step.y.clone()

    apply_lora_(y, step.x.requires_grad_(), step.weights, step.routing)

    assert not y.requires_grad
