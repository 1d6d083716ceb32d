"""One grid for every backend: dtype x rank x sizes x popularity, in steps with all that is awkward.

Base rows stand among the others, segments are empty, ranks unequal, slices absent; NaN fills the
slots that no entry names, what lies beyond a slot's rank, and the rows of base tokens. CPU backends
and GPUs take the whole product; the interpreter, which needs a second for some, takes cases in
which every two values meet.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.testing import assert_close

from lora_kernels import Backend, Routing, apply_lora_, expand_, shrink
from lora_kernels.testing import Popularity, slots_by_popularity, tolerance

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
RANKS = (1, 3, 8, 16, 17, 64, 256)
SIZES = (
    (1, 1, (1,)),
    (3, 37, (23,)),
    (7, 72, (80, 3)),
    (33, 129, (65,)),
    (133, 40, (24, 8, 8)),
)
POPULARITIES = tuple(Popularity)
NUM_USED, NUM_SLOTS = 5, 7
NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One point of the grid."""

    dtype: torch.dtype
    rank: int
    sizes: tuple[int, int, tuple[int, ...]]
    popularity: Popularity

    def __str__(self) -> str:
        num_tokens, in_features, widths = self.sizes
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}-r{self.rank}-{num_tokens}x{in_features}x{sum(widths)}-{self.popularity}"


def make_case(dtype: int, rank: int, size: int, popularity: int) -> Case:
    return Case(
        dtype=DTYPES[dtype],
        rank=RANKS[rank],
        sizes=SIZES[size],
        popularity=POPULARITIES[popularity],
    )


WHOLE = [make_case(*at) for at in itertools.product(range(3), range(7), range(5), range(4))]
# Ranks meet all sizes; over the five sizes the other two axes run through all their values.
PAIRWISE = [make_case((r + s) % 3, r, s, (r + s) % 4) for r in range(7) for s in range(5)]
PAIRWISE += [make_case(2, 6, 4, 3)]


def test_every_two_values_meet_in_the_cases_of_the_interpreter() -> None:
    def pairs(cases: list[Case]) -> set[object]:
        axes = [(c.dtype, c.rank, c.sizes, c.popularity) for c in cases]
        return {
            (first, second, values[first], values[second])
            for values in axes
            for first, second in itertools.combinations(range(4), 2)
        }

    assert pairs(PAIRWISE) == pairs(WHOLE)


def build(case: Case, make_step: Callable[..., Any], device: str) -> tuple[Any, Routing]:
    """A step whose every fourth token is of the base model, and its routing with empty segments."""
    num_tokens, in_features, widths = case.sizes
    slots = slots_by_popularity(
        case.popularity,
        num_tokens=num_tokens,
        num_slots=NUM_USED,
        generator=torch.Generator().manual_seed(num_tokens),
    )
    entries = [(t, slot, 0.5 + slot / 4) for t, slot in enumerate(slots) if t % 4 != 3]
    ranks = [[case.rank] * len(widths) for _ in range(NUM_SLOTS)]
    ranks[1] = [(case.rank + 1) // 2] * len(widths)
    ranks[2][-1] = 0 if len(widths) > 1 else 1
    ranks[3][0] = max(1, case.rank - 1)
    step = make_step(
        entries=entries,
        num_tokens=num_tokens,
        ranks=ranks,
        max_rank=case.rank + 3,
        in_features=in_features,
        widths=widths,
        dtype=case.dtype,
        device=device,
    )
    by_slot = [[entry for entry in entries if entry[1] == slot] for slot in range(NUM_SLOTS)]
    in_order = list(itertools.chain.from_iterable(by_slot))
    bounds = [0, *itertools.accumulate(map(len, by_slot))]
    routing = Routing.from_segments(
        token_idx=torch.tensor([t for t, _, _ in in_order], dtype=torch.int64),
        scales=torch.tensor([scale for _, _, scale in in_order], dtype=torch.float32),
        seg_indptr=torch.tensor(bounds),
        seg_slots=torch.arange(NUM_SLOTS),
        num_tokens=num_tokens,
        num_slots=NUM_SLOTS,
        device=device,
    )
    poison(step)
    return step, routing


def poison(step: Any) -> None:
    used = {slot for _, slot, _ in step.entries}
    touched = {token for token, _, _ in step.entries}
    for p, (a, b) in enumerate(zip(step.weights.lora_a, step.weights.lora_b, strict=True)):
        for slot, ranks in enumerate(step.weights.slot_ranks):
            rank = ranks[p] if slot in used else 0
            a[slot, rank:] = NAN
            b[slot, :, rank:] = NAN
    base = [t for t in range(step.x.shape[0]) if t not in touched]
    step.x[base] = NAN
    step.y[base] = NAN


def check(case: Case, backend: Backend, make_step: Callable[..., Any], device: str = "cpu") -> None:
    step, routing = build(case, make_step, device)

    result = apply_lora_(step.y.clone(), step.x, step.weights, routing, backend=backend)
    v = shrink(step.x, step.weights, routing, backend=backend)
    in_two = expand_(step.y.clone(), v, step.weights, routing, backend=backend)

    within = tolerance(case.dtype, reduction=step.reduction)
    rows = routing.touched_tokens.cpu()
    base = [t for t in range(case.sizes[0]) if t % 4 == 3]
    for actual in (result.cpu(), in_two.cpu()):
        assert_close(actual[rows].double(), step.exact[rows], atol=within.atol, rtol=within.rtol)
        assert actual[base].isnan().all()
    assert v.isfinite().all()


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.ATEN])
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_cpu_backends_equal_float64(
    make_step: Callable[..., Any], case: Case, backend: Backend
) -> None:
    check(case, backend, make_step)


@pytest.mark.triton
@pytest.mark.parametrize("case", PAIRWISE, ids=str)
def test_kernels_in_the_interpreter_equal_float64(
    make_step: Callable[..., Any], case: Case
) -> None:
    # torch fills what it does not initialise with NaN while this is on.
    torch.use_deterministic_algorithms(mode=True)
    try:
        check(case, Backend.TRITON, make_step)
    finally:
        torch.use_deterministic_algorithms(mode=False)


@pytest.mark.gpu
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_kernels_on_a_gpu_equal_float64(make_step: Callable[..., Any], case: Case) -> None:
    check(case, Backend.TRITON, make_step, device="cuda")
