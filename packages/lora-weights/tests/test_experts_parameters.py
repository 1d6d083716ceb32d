"""Pairs on 3D parameters: shapes say which is which, the release only where they cannot."""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING

import pytest

from lora_weights import ExpertShape
from lora_weights.experts.names import Projection
from lora_weights.experts.parameters import find_placings, is_reversed_by

if TYPE_CHECKING:
    from collections.abc import Sequence

SHAPE = ExpertShape(num_experts=4, hidden_size=64, intermediate_size=48)
GATE_UP, DOWN = (64, 96), (48, 64)


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("order", list(permutations((0, 1))))
@pytest.mark.parametrize("version", [None, "0.17.1", "0.18.1", "0.19.0", "0.19.1", "0.21.2"])
def test_c28_c30_distinct_shapes_decide_order_and_direction_whatever_the_release(
    order: Sequence[int], version: str | None, is_reversed: bool
) -> None:
    sizes = [(GATE_UP, DOWN)[index] for index in order]
    sizes = [size[::-1] for size in sizes] if is_reversed else sizes

    (placing,) = find_placings(sizes, SHAPE, version=version)

    assert placing.projections == tuple((Projection.W13, Projection.W2)[index] for index in order)
    assert placing.is_reversed is is_reversed


@pytest.mark.parametrize(
    ("version", "is_transposed", "is_reversed"),
    [
        ("0.17.0", False, True),
        ("0.18.1", False, True),
        ("0.18.1", True, False),
        ("0.18.0rc0", False, True),
        ("0.18.0.dev0@abc", False, True),
        ("0.19.0", False, True),
        ("0.19.0", True, True),
        ("0.19.1", False, False),
        ("0.19.1", True, False),
        ("0.20.0", True, False),
        ("0.21.2.dev0", False, False),
        ("1.0", False, False),
        ("0.18.2.dev0", False, None),
        ("0.19.1.dev0", True, None),
        (None, False, None),
        ("", False, None),
        ("latest", False, None),
    ],
)
def test_c28_releases_give_a_the_dimension_that_their_source_says(
    version: str | None, is_transposed: bool, is_reversed: bool | None
) -> None:
    assert is_reversed_by(version, is_transposed=is_transposed) is is_reversed


# Hidden 64 and intermediate 32: gate and up together are square, down is not.
SQUARE_FIRST = ExpertShape(num_experts=4, hidden_size=64, intermediate_size=32)


def test_c28_a_square_pair_follows_the_other_one_of_its_file() -> None:
    natural = find_placings([(64, 64), (32, 64)], SQUARE_FIRST)
    turned = find_placings([(64, 64), (64, 32)], SQUARE_FIRST)

    assert [placing.is_reversed for placing in natural] == [False]
    assert [placing.is_reversed for placing in turned] == [True]


@pytest.mark.parametrize(
    ("version", "found"),
    [("0.18.1", [True]), ("0.19.1", [False]), (None, [False, True]), ("?", [False, True])],
)
def test_c28_a_square_pair_alone_is_decided_by_the_release_or_not_at_all(
    version: str | None, found: list[bool]
) -> None:
    placings = find_placings([(64, 64)], SQUARE_FIRST, version=version)

    assert [placing.is_reversed for placing in placings] == found


UNGATED = ExpertShape(num_experts=4, hidden_size=64, intermediate_size=48, is_gated=False)


@pytest.mark.parametrize(("version", "is_reversed"), [("0.18.1", True), ("0.20.0", False)])
def test_without_a_gate_up_and_down_mirror_each_other_and_the_release_decides(
    version: str, is_reversed: bool
) -> None:
    (placing,) = find_placings([(64, 48), (48, 64)], UNGATED, version=version)

    up_first = (Projection.W1, Projection.W2)
    assert placing.projections == (up_first[::-1] if is_reversed else up_first)
    assert len(find_placings([(64, 48), (48, 64)], UNGATED)) == 2


def test_a_single_declared_parameter_tells_which_one_a_single_pair_is() -> None:
    (up,) = find_placings([(64, 48)], UNGATED, parameters=["up_proj"])
    (down,) = find_placings([(64, 48)], UNGATED, parameters=["down_proj"])

    assert (up.projections, up.is_reversed) == ((Projection.W1,), False)
    assert (down.projections, down.is_reversed) == ((Projection.W2,), True)


def test_a_declaration_that_contradicts_the_shapes_changes_nothing() -> None:
    (placing,) = find_placings([GATE_UP], SHAPE, parameters=["down_proj"], version="0.17.0")

    assert placing.projections == (Projection.W13,)


def test_sizes_of_another_model_fit_nowhere() -> None:
    assert find_placings([(64, 97), DOWN], SHAPE) == []
    assert find_placings([GATE_UP, GATE_UP], SHAPE) == []
