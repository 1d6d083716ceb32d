"""embedding_lora_ against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lora_kernels import (
    Backend,
    KernelArgumentError,
    UnsupportedShapeError,
    embedding_lora_,
    route_tokens,
)
from lora_kernels.testing import tolerance

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 19


def exact_embedding(step: Any, ids: Tensor) -> Tensor:
    result: Tensor = step.y.double().clone()
    for token, slot, scale in step.entries:
        pair = step.pairs[slot][0]
        if pair is not None:
            result[token] += scale * (pair[1].double() @ pair[0][:, ids[token]].double())
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 133])
def test_embedding_equals_float64(
    make_step: Callable[..., Any],
    backend: Backend,
    dtype: torch.dtype,
    id_dtype: torch.dtype,
    num_tokens: int,
) -> None:
    entries = [(t, t % 4, 1.0 + t % 2) for t in range(num_tokens)]
    entries += [(t, 2, -0.5) for t in range(0, num_tokens, 3)]
    step = make_step(
        entries=entries,
        num_tokens=num_tokens,
        ranks=[(8,), (3,), (16,), (0,)],
        in_features=VOCABULARY,
        widths=(30,),
        dtype=dtype,
    )
    ids = torch.randint(0, VOCABULARY, (num_tokens,), dtype=id_dtype)

    result = embedding_lora_(step.y.clone(), ids, step.weights, step.routing, backend=backend)

    within = tolerance(dtype, reduction=64)
    assert_close(result.double(), exact_embedding(step, ids), atol=within.atol, rtol=within.rtol)


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.ATEN])
@pytest.mark.parametrize("bad_id", [-1, VOCABULARY])
def test_an_id_outside_the_vocabulary_is_refused_before_anything_is_written(
    make_step: Callable[..., Any], backend: Backend, bad_id: int
) -> None:
    step = make_step(
        entries=[(0, 0, 1.0), (1, 0, 1.0)], num_tokens=2, ranks=[(4,)], in_features=VOCABULARY
    )
    y = step.y.clone()

    with pytest.raises(KernelArgumentError, match=rf"{bad_id}.*expected 0\.\.18"):
        embedding_lora_(y, torch.tensor([1, bad_id]), step.weights, step.routing, backend=backend)

    assert torch.equal(y, step.y)


def test_a_step_without_entries_returns_at_once(
    make_step: Callable[..., Any], backend: Backend
) -> None:
    step = make_step(entries=[], num_tokens=2, ranks=[(4,)], in_features=VOCABULARY)

    result = embedding_lora_(
        step.y, torch.tensor([-5, 99]), step.weights, step.routing, backend=backend
    )

    assert result is step.y


@pytest.mark.triton
@pytest.mark.parametrize("bad_id", [-1, VOCABULARY, 10**12])
def test_kernels_add_nothing_for_an_id_outside_the_vocabulary(
    make_step: Callable[..., Any], bad_id: int
) -> None:
    step = make_step(
        entries=[(0, 0, 1.0), (1, 1, 1.0)], num_tokens=2, ranks=[(4,)] * 2, in_features=VOCABULARY
    )
    ids = torch.tensor([bad_id, 3])

    result = embedding_lora_(
        step.y.clone(), ids, step.weights, step.routing, backend=Backend.TRITON
    )

    assert torch.equal(result[0], step.y[0])
    assert not torch.equal(result[1], step.y[1])


def test_wrong_ids_and_packed_weights_are_refused(make_step: Callable[..., Any]) -> None:
    step = make_step(entries=[(0, 0, 1.0)], num_tokens=2, ranks=[(4,)], in_features=VOCABULARY)
    packed = make_step(
        entries=[(0, 0, 1.0)], num_tokens=2, ranks=[(4, 4)], widths=(3, 3), in_features=VOCABULARY
    )
    routing = route_tokens([0, None], num_slots=1)

    with pytest.raises(UnsupportedShapeError, match=r"token_ids is \[3\], expected \[2\]"):
        embedding_lora_(step.y, torch.zeros(3, dtype=torch.int64), step.weights, routing)
    with pytest.raises(KernelArgumentError, match=r"token_ids is torch\.float32"):
        embedding_lora_(step.y, torch.zeros(2), step.weights, routing)
    with pytest.raises(UnsupportedShapeError, match="2 slices, expected 1"):
        embedding_lora_(packed.y, torch.zeros(2, dtype=torch.int64), packed.weights, routing)
    with pytest.raises(UnsupportedShapeError, match="y is"):
        embedding_lora_(step.y[:1], torch.zeros(2, dtype=torch.int64), step.weights, routing)
