"""What a step must not touch: base rows, other tokens, and slots that no entry names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from lora_kernels import Backend, apply_lora_, embedding_lora_, expand_, route_tokens, shrink
from lora_kernels._aten.plan import Way
from lora_kernels.testing import random_weights

if TYPE_CHECKING:
    from collections.abc import Callable

WAYS = [
    (Way.BAGS, 64),  # one dense product
    (Way.BAGS, 3),  # a dense product of the first ranks, the rest by segment
    (Way.BAGS, 0),  # products by segment
    (Way.DENSE, 64),
    (Way.SEGMENTS, 0),
    (Way.WIDE, 0),
]
LOOKING_AT_NAMED_SLOTS = [way for way in WAYS if way[0] is not Way.DENSE]
NAN = float("nan")


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


@pytest.mark.parametrize("slots", [[None, 0], [0, None], [None, None, 0, 1, None], [1, None, 1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_base_rows_keep_their_bits(
    make_step: Callable[..., Any], backend: Backend, slots: list[int | None], dtype: torch.dtype
) -> None:
    entries = [(t, slot, 1.0) for t, slot in enumerate(slots) if slot is not None]
    step = make_step(entries=entries, num_tokens=len(slots), ranks=[(8,), (3,)], dtype=dtype)
    base = [t for t, slot in enumerate(slots) if slot is None]
    y = step.y.clone()
    y[base, :3] = torch.tensor([-0.0, NAN, -float("inf")], dtype=dtype)
    before = bits(y)[base].clone()

    apply_lora_(y, step.x, step.weights, step.routing, backend=backend)

    assert torch.equal(bits(y)[base], before)


@pytest.mark.parametrize("way", WAYS)
def test_base_rows_keep_their_bits_on_every_way(
    make_step: Callable[..., Any], force_way: Callable[..., None], way: tuple[Way, int]
) -> None:
    force_way(*way)
    entries = [(t, t % 3, 1.0) for t in range(40) if t % 5]
    step = make_step(entries=entries, num_tokens=40, ranks=[(8,)] * 3, dtype=torch.bfloat16)
    y = step.y.clone()
    y[::5] = -0.0
    before = bits(y)[::5].clone()

    apply_lora_(y, step.x, step.weights, step.routing)

    assert torch.equal(bits(y)[::5], before)


def test_a_step_of_base_tokens_changes_nothing_right_after_one_with_adapters(
    make_step: Callable[..., Any], backend: Backend
) -> None:
    step = make_step(entries=[(0, 0, 1.0)], num_tokens=2, ranks=[(8,)])
    apply_lora_(step.y.clone(), step.x, step.weights, step.routing, backend=backend)
    none = route_tokens([None, None], num_slots=1)
    before = step.y.clone()

    apply_lora_(step.y, step.x, step.weights, none, backend=backend)
    v = shrink(step.x, step.weights, none, backend=backend)
    expand_(step.y, v, step.weights, none, backend=backend)

    assert torch.equal(step.y, before)
    assert v.shape == (1, 0, 64)


@pytest.mark.parametrize("way", LOOKING_AT_NAMED_SLOTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_in_unnamed_slots_and_beyond_the_rank_reaches_no_output(
    make_step: Callable[..., Any],
    force_way: Callable[..., None],
    way: tuple[Way, int],
    dtype: torch.dtype,
) -> None:
    force_way(*way)
    entries = [(t, 2 * (t % 3), 1.0) for t in range(24) if t % 4]
    step = make_step(
        entries=entries,
        num_tokens=24,
        ranks=[(8, 4), (8, 8), (3, 8), (8, 8), (8, 8), (8, 8)],
        max_rank=16,
        widths=(16, 8),
        dtype=dtype,
    )
    clean = apply_lora_(step.y.clone(), step.x, step.weights, step.routing)
    for a, b in zip(step.weights.lora_a, step.weights.lora_b, strict=True):
        a[[1, 3, 5]] = NAN
        b[[1, 3, 5]] = NAN
        a[:, 8:] = NAN
        b[:, :, 8:] = NAN
    step.weights.lora_a[0][2, 3:] = NAN
    step.weights.lora_b[0][2, :, 3:] = NAN
    step.x[::4] = NAN

    poisoned = apply_lora_(step.y.clone(), step.x, step.weights, step.routing)

    assert torch.equal(poisoned, clean)


@pytest.mark.parametrize("way", LOOKING_AT_NAMED_SLOTS)
def test_an_adapter_full_of_nan_spoils_only_its_own_tokens(
    make_step: Callable[..., Any], force_way: Callable[..., None], way: tuple[Way, int]
) -> None:
    force_way(*way)
    entries = [(t, t % 4, 1.0) for t in range(20)]
    step = make_step(entries=entries, num_tokens=20, ranks=[(8,)] * 4)
    clean = apply_lora_(step.y.clone(), step.x, step.weights, step.routing)
    step.weights.lora_a[0][1] = NAN
    step.weights.lora_b[0][1] = float("inf")

    spoiled = apply_lora_(step.y.clone(), step.x, step.weights, step.routing)

    others = [t for t in range(20) if t % 4 != 1]
    assert torch.equal(spoiled[others], clean[others])
    assert spoiled[1::4].isnan().all()


def test_embedding_ignores_unnamed_slots_and_the_ids_of_base_tokens(
    backend: Backend, make_step: Callable[..., Any]
) -> None:
    step = make_step(entries=[(1, 1, 1.0)], num_tokens=3, ranks=[(4,)] * 3, in_features=9)
    ids = torch.tensor([-7, 8, 10**9])
    clean = embedding_lora_(step.y.clone(), ids, step.weights, step.routing, backend=backend)
    for slot in (0, 2):
        step.weights.lora_a[0][slot] = NAN
        step.weights.lora_b[0][slot] = NAN

    poisoned = embedding_lora_(step.y.clone(), ids, step.weights, step.routing, backend=backend)

    assert torch.equal(poisoned, clean)
    assert torch.equal(bits(clean)[[0, 2]], bits(step.y)[[0, 2]])
    assert not torch.equal(clean[1], step.y[1])


@pytest.mark.parametrize("num_tokens", [2, 16, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_without_any_slice_of_the_module_changes_nothing_beside_one_with(
    backend: Backend, num_tokens: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(5)
    weights = random_weights(
        [(0, 0, 0), (4, 4, 4)],
        max_rank=8,
        in_features=24,
        out_features=(16, 8, 8),
        dtype=dtype,
        generator=generator,
    )
    x = torch.randn(num_tokens, 24, generator=generator).to(dtype)
    y = torch.randn(num_tokens, 32, generator=generator).to(dtype)
    half = num_tokens // 2
    before = y.clone()

    routing = route_tokens([0] * half + [1] * (num_tokens - half), num_slots=2)
    apply_lora_(y, x, weights, routing, backend=backend)

    assert torch.equal(bits(y)[:half], bits(before)[:half])
    assert not torch.equal(y[half:], before[half:])
