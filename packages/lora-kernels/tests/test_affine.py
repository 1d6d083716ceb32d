"""Output gain and bias of slots against float64, in every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lora_kernels import (
    Backend,
    KernelArgumentError,
    StackedWeights,
    UnsupportedShapeError,
    apply_lora_,
    embedding_lora_,
    expand_,
    shrink,
)
from lora_kernels.testing import tolerance

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTHS = (16, 8)
RANKS = [(8, 3), (0, 0), (4, 4), (0, 5), (8, 8)]
GAINS = {1: 7, 2: 8}  # slot -> seed
BIASES = {2: 9, 3: 10}


def values(seed: int, *, around: float = 0.0) -> Tensor:
    return around + torch.randn(sum(WIDTHS), generator=torch.Generator().manual_seed(seed)) / 2


def fill_affine(step: Any) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Slot 1 gets a gain, 2 both, 3 a bias, 0 and 4 neither."""
    gains = {slot: values(seed, around=1.0) for slot, seed in GAINS.items()}
    biases = {slot: values(seed) for slot, seed in BIASES.items()}
    for slot in {*gains, *biases}:
        step.weights.write_slot(slot, step.pairs[slot], gain=gains.get(slot), bias=biases.get(slot))
    return gains, biases


def exact_affine(
    step: Any, pairs_only: Tensor, gains: dict[int, Tensor], biases: dict[int, Tensor]
) -> Tensor:
    result = pairs_only.clone()
    for token, slot, _ in step.entries:
        if slot in gains:
            result[token] *= gains[slot].double()
    for token, slot, scale in step.entries:
        if slot in biases:
            result[token] += scale * biases[slot].double()
    return result


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    within = tolerance(dtype, reduction=64)
    # A gain of up to 3 stretches the rounding of what it multiplies.
    assert_close(actual.double(), expected, atol=3 * within.atol, rtol=3 * within.rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [5, 90])
@pytest.mark.parametrize("in_runs", [True, False])
def test_gains_and_biases_equal_float64(
    make_step: Callable[..., Any],
    backend: Backend,
    dtype: torch.dtype,
    num_tokens: int,
    in_runs: bool,
) -> None:
    slots = [t * 6 // num_tokens if in_runs else (5 * t) % 6 for t in range(num_tokens)]
    entries = [(t, slot, 1.0) for t, slot in enumerate(slots) if slot < 5]
    step = make_step(
        entries=entries, num_tokens=num_tokens, ranks=RANKS, widths=WIDTHS, dtype=dtype
    )
    gains, biases = fill_affine(step)
    base = [t for t, slot in enumerate(slots) if slot == 5]

    result = apply_lora_(step.y.clone(), step.x, step.weights, step.routing, backend=backend)
    v = shrink(step.x, step.weights, step.routing, backend=backend)
    in_two = expand_(step.y.clone(), v, step.weights, step.routing, backend=backend)

    expected = exact_affine(step, step.exact, gains, biases)
    close(result, expected, dtype)
    close(in_two, expected, dtype)
    assert torch.equal(result[base], step.y[base])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_of_a_weighted_set_add_up_with_their_scales(
    make_step: Callable[..., Any], backend: Backend, dtype: torch.dtype
) -> None:
    entries = [(t, slot, 0.5 + slot / 4) for t in range(9) for slot in (0, 3, 4) if t % 3]
    entries += [(t, 2, 1.0) for t in range(0, 9, 3)]  # gain and bias, alone on their tokens
    step = make_step(entries=entries, num_tokens=10, ranks=RANKS, widths=WIDTHS, dtype=dtype)
    gains, biases = fill_affine(step)

    result = apply_lora_(step.y.clone(), step.x, step.weights, step.routing, backend=backend)

    close(result, exact_affine(step, step.exact, gains, biases), dtype)
    assert torch.equal(result[9], step.y[9])


def test_an_embedding_takes_gain_and_bias_too(
    make_step: Callable[..., Any], backend: Backend
) -> None:
    step = make_step(
        entries=[(0, 0, 1.0), (1, 1, 1.0), (3, 1, 1.0)],
        num_tokens=4,
        ranks=[(4,), (0,)],
        in_features=9,
        widths=(24,),
    )
    gain, bias = values(1, around=1.0), values(2)
    step.weights.write_slot(1, [None], gain=gain, bias=bias)
    ids = torch.tensor([3, 8, 0, 1])

    result = embedding_lora_(step.y.clone(), ids, step.weights, step.routing, backend=backend)

    lora_a, lora_b = step.pairs[0][0]
    close(result[0], step.y[0].double() + lora_b.double() @ lora_a[:, 3].double(), torch.float32)
    close(result[[1, 3]], step.y[[1, 3]].double() * gain + bias, torch.float32)
    assert torch.equal(result[2], step.y[2])


@pytest.mark.parametrize(
    "entries", [[(0, 1, 0.5)], [(0, 1, 1.0), (0, 0, 1.0)], [(0, 1, 1.0), (0, 1, 1.0)]]
)
def test_a_gain_in_a_weighted_set_is_refused_before_anything_is_written(
    make_step: Callable[..., Any], backend: Backend, entries: list[tuple[int, int, float]]
) -> None:
    step = make_step(entries=entries, num_tokens=2, ranks=[(4,), (4,)])
    step.weights.write_slot(1, step.pairs[1], gain=torch.ones(24))
    y = step.y.clone()

    with pytest.raises(KernelArgumentError, match=r"apply_lora_: slots \[1\] have an output gain"):
        apply_lora_(y, step.x, step.weights, step.routing, backend=backend)
    v = shrink(step.x, step.weights, step.routing, backend=backend)
    with pytest.raises(KernelArgumentError, match=r"expand_: slots \[1\]"):
        expand_(y, v, step.weights, step.routing, backend=backend)

    assert torch.equal(y, step.y)


def test_a_gain_beside_weighted_sets_of_other_slots_is_right(
    make_step: Callable[..., Any],
) -> None:
    step = make_step(
        entries=[(0, 0, 0.5), (0, 1, 0.5), (1, 2, 1.0)], num_tokens=2, ranks=[(4,)] * 3
    )
    step.weights.write_slot(2, step.pairs[2], gain=torch.full((24,), 2.0))

    result = apply_lora_(step.y.clone(), step.x, step.weights, step.routing)

    close(result, step.exact * torch.tensor([[1.0], [2.0]]), torch.float32)


def test_nothing_of_a_gain_or_bias_remains_in_a_slot_written_anew_or_reset() -> None:
    weights = StackedWeights.allocate(
        num_slots=2,
        max_rank=4,
        in_features=5,
        out_features=(3,),
        dtype=torch.bfloat16,
        device="cpu",
    )
    unused = weights.nbytes

    weights.write_slot(0, [None], gain=torch.full((3,), 2.0), bias=torch.ones(3))
    affine = weights.affine
    assert affine is not None
    assert affine.dtype == torch.float32
    assert weights.nbytes == unused + 2 * 2 * 3 * 4
    address = affine.data_ptr()
    assert weights.gain_slots == weights.bias_slots == {0}
    weights.write_slot(0, [None], bias=torch.zeros(3))
    assert affine.tolist() == [[[1.0] * 3] * 2, [[0.0] * 3] * 2]
    assert (not weights.gain_slots, sorted(weights.bias_slots)) == (True, [0])
    weights.write_slot(1, [None], gain=torch.zeros(3))
    weights.reset_slot(1)
    weights.reset_slot(0)
    assert affine.tolist() == [[[1.0] * 3] * 2, [[0.0] * 3] * 2]
    assert weights.gain_slots == weights.bias_slots == frozenset()
    assert weights.allocate_affine().data_ptr() == address


def test_a_gain_or_bias_of_another_length_is_refused_and_the_slot_stays() -> None:
    weights = StackedWeights.allocate(
        num_slots=1,
        max_rank=4,
        in_features=5,
        out_features=(3, 2),
        dtype=torch.float32,
        device="cpu",
    )
    weights.write_slot(0, [None, None], gain=torch.full((5,), 2.0))

    with pytest.raises(UnsupportedShapeError) as refusal:
        weights.write_slot(0, [None, None], gain=torch.ones(3), bias=torch.ones(1, 5))

    assert "gain is [3], expected [5]" in str(refusal.value)
    assert "bias is [1, 5], expected [5]" in str(refusal.value)
    assert weights.affine is not None
    assert weights.affine[0].tolist() == [[2.0] * 5]
