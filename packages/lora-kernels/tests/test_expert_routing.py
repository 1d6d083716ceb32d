"""align_experts against a sort of Python tuples."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_kernels import (
    ExpertRouting,
    KernelArgumentError,
    UnsupportedShapeError,
    align_experts,
    build_routing,
    route_tokens,
)

NUM_SLOTS = 3


def pairs_of(found: ExpertRouting) -> list[tuple[int, int, int, int]]:
    """Slot, expert, row and pair of everything in a group."""
    rows, pairs = found.pair_rows.tolist(), found.pair_idx.tolist()
    bounds, keys = (part.tolist() for part in found.groups)
    return [
        (*divmod(key, found.num_experts), rows[m], pairs[m])
        for key, (start, end) in zip(keys, pairwise(bounds), strict=True)
        for m in range(start, end)
    ]


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], list[list[int]], int, int]:
    num_tokens = draw(st.integers(0, 6))
    num_choices, num_experts = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    entry = st.tuples(st.integers(0, max(num_tokens - 1, 0)), st.integers(0, NUM_SLOTS - 1))
    entries = draw(st.lists(entry, max_size=10 if num_tokens else 0))
    row = st.lists(st.integers(-2, 6), min_size=num_choices, max_size=num_choices)
    ids = draw(st.lists(row, min_size=num_tokens, max_size=num_tokens))
    return num_tokens, entries, ids, num_experts, num_choices


@given(step=steps(), offset=st.integers(0, 3))
def test_pairs_are_sorted_by_slot_and_expert_and_keep_the_order_of_the_entries(
    step: tuple[int, list[tuple[int, int]], list[list[int]], int, int], offset: int
) -> None:
    num_tokens, entries, ids, num_experts, num_choices = step
    routing = build_routing(
        token_idx=[token for token, _ in entries],
        slots=[slot for _, slot in entries],
        scales=[0.5 + token for token, _ in entries],
        num_tokens=num_tokens,
        num_slots=NUM_SLOTS,
    )
    in_order = sorted(entries, key=lambda entry: (entry[1], entry[0]))
    expected = sorted(
        (slot, ids[token][k] - offset, token * num_choices + k, e * num_choices + k)
        for e, (token, slot) in enumerate(in_order)
        for k in range(num_choices)
        if offset <= ids[token][k] < offset + num_experts
    )
    expected.sort(key=lambda pair: (pair[0], pair[1], pair[3]))

    expert_ids = torch.tensor(ids, dtype=torch.int64).view(num_tokens, num_choices)
    found = align_experts(routing, expert_ids, num_experts=num_experts, expert_offset=offset)

    assert pairs_of(found) == expected
    bounds, keys = (part.tolist() for part in found.groups)
    assert bounds[-1] == len(expected)
    assert found.scales[: len(expected)].tolist() == [
        0.5 + row // num_choices for _, _, row, _ in expected
    ]
    present = [key for key, (start, end) in zip(keys, pairwise(bounds), strict=True) if end > start]
    assert present == sorted({slot * num_experts + expert for slot, expert, _, _ in expected})


def test_the_sizes_follow_from_the_shapes_alone() -> None:
    routing = route_tokens([0, 1, None, 1, 2], num_slots=NUM_SLOTS)
    some = align_experts(routing, torch.tensor([[0, 1]] * 5), num_experts=2)
    none = align_experts(routing, torch.full((5, 2), -1), num_experts=2)

    for name in ("pair_idx", "pair_keys", "pair_rows", "scales", "local_ids"):
        assert getattr(some, name).shape == getattr(none, name).shape
    assert [part.tolist() for part in some.groups] == [[0, 1, 2, 4, 6, 7, 8], [0, 1, 2, 3, 4, 5]]
    assert [part.tolist() for part in none.groups] == [[0] * 7, [0] * 6]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ids_that_are_not_here_have_no_pair(dtype: torch.dtype) -> None:
    largest = torch.iinfo(dtype).max
    routing = route_tokens([0, 1, None], num_slots=NUM_SLOTS)
    ids = torch.tensor([[4, largest], [-largest - 1, 5], [4, 5]], dtype=dtype)

    found = align_experts(routing, ids, num_experts=2, expert_offset=4)

    assert pairs_of(found) == [(0, 0, 0, 0), (1, 1, 3, 3)]
    assert found.local_ids.tolist() == [[0, 6], [6, 1], [0, 1]]


@pytest.mark.parametrize("shape", [(3,), (2, 2), (3, 2, 1)])
def test_ids_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    routing = route_tokens([0, 1, None], num_slots=NUM_SLOTS)

    with pytest.raises(UnsupportedShapeError, match=r"expected \[3, K\]"):
        align_experts(routing, torch.zeros(shape, dtype=torch.int64), num_experts=2)


def test_ids_that_are_not_integers_are_refused() -> None:
    routing = route_tokens([0], num_slots=NUM_SLOTS)

    with pytest.raises(KernelArgumentError, match=r"torch\.float32, expected int64 or int32"):
        align_experts(routing, torch.zeros(1, 2), num_experts=2)


@pytest.mark.parametrize(
    ("num_choices", "num_experts", "expert_offset"), [(0, 2, 0), (2, 0, 0), (2, 2, -1)]
)
def test_impossible_numbers_are_refused(
    num_choices: int, num_experts: int, expert_offset: int
) -> None:
    routing = route_tokens([0], num_slots=NUM_SLOTS)
    ids = torch.zeros(1, num_choices, dtype=torch.int64)

    with pytest.raises(KernelArgumentError, match="expected at least one expert from 0 on"):
        align_experts(routing, ids, num_experts=num_experts, expert_offset=expert_offset)


def test_ids_on_another_device_are_refused() -> None:
    routing = route_tokens([0], num_slots=NUM_SLOTS)
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")

    with pytest.raises(KernelArgumentError, match="expert_ids is on meta, routing on cpu"):
        align_experts(routing, ids, num_experts=2)


def test_the_representation_names_the_sizes() -> None:
    routing = route_tokens([0, None], num_slots=NUM_SLOTS)
    found = align_experts(routing, torch.zeros(2, 2, dtype=torch.int64), num_experts=4)

    assert repr(found) == (
        "ExpertRouting(num_tokens=2, num_choices=2, num_experts=4, num_slots=3, device='cpu')"
    )
