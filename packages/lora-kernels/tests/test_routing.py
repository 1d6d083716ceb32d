"""Routing: what is built, what is refused, what is derived."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_kernels import (
    KernelArgumentError,
    Routing,
    Segment,
    build_routing,
    route_runs,
    route_tokens,
)


def test_entries_are_sorted_by_slot_and_stable_in_token_order() -> None:
    routing = route_tokens([2, None, 0, 2, 0], num_slots=4)

    assert routing.token_idx.tolist() == [2, 4, 0, 3]
    assert routing.seg_slots.tolist() == [0, 2]
    assert routing.seg_indptr.tolist() == [0, 2, 4]
    assert routing.scales.tolist() == [1, 1, 1, 1]
    assert (routing.token_idx.dtype, routing.scales.dtype) == (torch.int64, torch.float32)


def test_entries_given_in_any_order_keep_their_scales() -> None:
    routing = build_routing(
        token_idx=[3, 0, 3], slots=[1, 1, 0], scales=[0.5, 0.25, 2.0], num_tokens=4, num_slots=2
    )

    assert routing.token_idx.tolist() == [3, 0, 3]
    assert routing.scales.tolist() == [2.0, 0.25, 0.5]
    assert routing.entry_slots.tolist() == [0, 1, 1]
    assert not routing.has_unit_scales


def test_a_token_without_adapter_has_no_entry_and_no_segment() -> None:
    routing = route_tokens([None, 1, None], num_slots=2)

    assert routing.num_entries == 1
    assert [segment.slot for segment in routing.segments] == [1]
    assert routing.touched_tokens.tolist() == [1]


@pytest.mark.parametrize("token_slots", [[], [None], [None, None, None]])
def test_a_step_without_adapters_is_empty(token_slots: list[int | None]) -> None:
    routing = route_tokens(token_slots, num_slots=3)

    assert routing.is_empty
    assert routing.segments == ()
    assert routing.num_tokens == len(token_slots)


def test_segments_of_consecutive_tokens_know_their_first_token() -> None:
    routing = route_tokens([0, 0, 1, None, 1, 2, 2, 2], num_slots=3)

    assert routing.segments == (
        Segment(slot=0, start=0, end=2, first_token=0),
        Segment(slot=1, start=2, end=4, first_token=None),
        Segment(slot=2, start=4, end=7, first_token=5),
    )


def test_a_repeated_token_is_not_taken_for_a_run() -> None:
    routing = build_routing(token_idx=[1, 1, 3], slots=[0, 0, 0], num_tokens=4, num_slots=1)

    assert routing.segments == (Segment(slot=0, start=0, end=3, first_token=None),)
    assert routing.has_repeated_tokens


def test_touched_tokens_are_counted_once_and_placed() -> None:
    routing = build_routing(token_idx=[4, 2, 4], slots=[0, 1, 2], num_tokens=6, num_slots=3)

    assert routing.touched_tokens.tolist() == [2, 4]
    assert routing.touched_range == (2, 3)
    assert not routing.is_touched_run
    assert routing.entry_rows.tolist() == [1, 0, 1]


def test_a_routing_may_be_built_from_sorted_segments_with_empty_ones_between() -> None:
    routing = Routing.from_segments(
        token_idx=torch.tensor([0, 1]),
        scales=torch.ones(2),
        seg_indptr=torch.tensor([0, 0, 2, 2]),
        seg_slots=torch.tensor([0, 1, 2]),
        num_tokens=2,
        num_slots=3,
    )

    assert [(s.start, s.end, s.first_token) for s in routing.segments] == [
        (0, 0, None),
        (0, 2, 0),
        (2, 2, None),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": [0, 3]}, "slots holds 3, expected 0..2"),
        ({"slots": [-1, 0]}, "slots holds -1"),
        ({"token_idx": [0, 4]}, "token_idx holds 4, expected 0..3"),
        ({"slots": [0]}, "expected one length"),
        ({"scales": [1.0]}, "expected one length"),
        ({"scales": [1.0, float("nan")]}, "expected finite"),
        ({"token_idx": [[0, 1]]}, "expected one length"),
    ],
)
def test_build_refuses_entries_out_of_range(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "token_idx": [0, 1],
        "slots": [0, 1],
        "num_tokens": 4,
        "num_slots": 3,
    }

    with pytest.raises(KernelArgumentError, match=message):
        build_routing(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seg_indptr": torch.tensor([0, 1])}, "lengths are"),
        ({"scales": torch.ones(3)}, "lengths are"),
        ({"seg_indptr": torch.tensor([0, 2, 1])}, "expected bounds growing"),
        ({"seg_indptr": torch.tensor([1, 1, 2])}, "expected bounds growing"),
        ({"seg_indptr": torch.tensor([0, 1, 3])}, "expected bounds growing"),
        ({"seg_slots": torch.tensor([1, 0])}, "strictly growing slots"),
        ({"seg_slots": torch.tensor([1, 1])}, "strictly growing slots"),
        ({"seg_slots": torch.tensor([0, 5])}, "seg_slots holds 5"),
        ({"token_idx": torch.tensor([0, 9])}, "token_idx holds 9"),
        ({"scales": torch.tensor([1.0, float("inf")])}, "expected finite"),
    ],
)
def test_from_segments_refuses_what_does_not_add_up(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "token_idx": torch.tensor([0, 1]),
        "scales": torch.ones(2),
        "seg_indptr": torch.tensor([0, 1, 2]),
        "seg_slots": torch.tensor([0, 1]),
        "num_tokens": 2,
        "num_slots": 3,
    }

    with pytest.raises(KernelArgumentError, match=message):
        Routing.from_segments(**(arguments | change))


def test_a_routing_cannot_be_changed_and_is_equal_only_to_itself() -> None:
    routing = route_tokens([0], num_slots=1)

    assert routing != route_tokens([0], num_slots=1)
    assert routing == routing  # noqa: PLR0124
    with pytest.raises(FrozenInstanceError):
        routing.num_tokens = 2  # type: ignore[misc]


def test_the_tensors_reach_another_device_as_parts_of_one_copy() -> None:
    entries: dict[str, Any] = {"token_idx": [0, 2], "slots": [1, 0], "scales": [0.5, 1.0]}

    routing = build_routing(**entries, num_tokens=3, num_slots=2, device="meta")

    tensors = (routing.token_idx, routing.seg_indptr, routing.seg_slots, routing.scales)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert [list(tensor.shape) for tensor in tensors] == [[2], [3], [2], [2]]
    assert len({tensor.untyped_storage()._cdata for tensor in tensors}) == 1


def test_repr_names_what_matters() -> None:
    assert repr(route_tokens([1, None], num_slots=2)) == (
        "Routing(num_tokens=2, num_entries=1, slots=[1], num_slots=2, device='cpu')"
    )


def test_runs_are_routed_as_their_entries_are() -> None:
    runs = [(3, [(1, 1.0)]), (2, []), (0, [(0, 2.0)]), (2, [(2, 0.5), (0, 0.25), (2, 1.5)])]
    token_idx = [0, 1, 2, 5, 6, 5, 6, 5, 6]
    slots = [1, 1, 1, 2, 2, 0, 0, 2, 2]
    scales = [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 1.5, 1.5]

    by_runs = route_runs(runs, num_slots=3)
    by_entries = build_routing(
        token_idx=token_idx, slots=slots, scales=scales, num_tokens=7, num_slots=3
    )

    assert by_runs.num_tokens == 7
    assert by_runs.segments == by_entries.segments
    for name in ("token_idx", "scales", "seg_indptr", "seg_slots"):
        assert torch.equal(getattr(by_runs, name), getattr(by_entries, name))


RUNS = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1.0, 0.5, 0.1])), max_size=3),
    ),
    max_size=6,
)


@given(RUNS)
def test_any_runs_are_routed_as_their_entries_are(
    runs: list[tuple[int, list[tuple[int, float]]]],
) -> None:
    entries, start = [], 0
    for length, pairs in runs:
        entries += [(start + i, slot, scale) for slot, scale in pairs for i in range(length)]
        start += length

    by_runs = route_runs(runs, num_slots=4)
    by_entries = build_routing(
        token_idx=[token for token, _, _ in entries],
        slots=[slot for _, slot, _ in entries],
        scales=[scale for _, _, scale in entries],
        num_tokens=start,
        num_slots=4,
    )

    for field in fields(Routing):
        found, expected = getattr(by_runs, field.name), getattr(by_entries, field.name)
        same = torch.equal(found, expected) if torch.is_tensor(found) else found == expected
        assert same, field.name


@pytest.mark.parametrize("runs", [[], [(0, [])], [(4, [])], [(0, [(1, 1.0)])]])
def test_runs_without_entries_are_an_empty_routing(
    runs: list[tuple[int, list[tuple[int, float]]]],
) -> None:
    routing = route_runs(runs, num_slots=2)

    assert routing.is_empty
    assert routing.num_tokens == sum(length for length, _ in runs)


def test_wrong_runs_are_refused() -> None:
    with pytest.raises(KernelArgumentError, match="a run has -1 tokens"):
        route_runs([(-1, [])], num_slots=2)
    with pytest.raises(KernelArgumentError, match=r"slots holds 2, expected 0\.\.1"):
        route_runs([(1, [(2, 1.0)])], num_slots=2)
    with pytest.raises(KernelArgumentError, match="expected finite"):
        route_runs([(1, [(0, float("nan"))])], num_slots=2)


def test_a_negative_slot_is_refused_and_not_taken_for_the_base() -> None:
    with pytest.raises(KernelArgumentError, match=r"slots holds -1, expected 0\.\.1"):
        route_tokens([0, -1], num_slots=2)


def test_slots_that_are_scaled_or_share_a_token_are_known() -> None:
    routing = build_routing(
        token_idx=[0, 1, 1, 2, 3],
        slots=[0, 1, 2, 3, 4],
        scales=[1.0, 1.0, 1.0, 0.5, 1.0],
        num_tokens=4,
        num_slots=5,
    )

    assert routing.mixed_slots == {1, 2, 3}
    assert routing.has_repeated_tokens
    assert route_tokens([0, 1, 0], num_slots=2).mixed_slots == frozenset()


def test_sorted_entries_whose_tokens_fall_within_a_segment_are_refused() -> None:
    with pytest.raises(KernelArgumentError, match=r"token_idx falls at entries \[2\]"):
        Routing.from_segments(
            token_idx=torch.tensor([1, 3, 2, 4]),
            scales=torch.ones(4),
            seg_indptr=torch.tensor([0, 4]),
            seg_slots=torch.tensor([0]),
            num_tokens=5,
            num_slots=1,
        )
