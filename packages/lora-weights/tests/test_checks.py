"""Checks of one adapter by itself, where load_adapter's tests do not reach."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from lora_weights import AdapterConfig
from lora_weights.checks import check_finite
from lora_weights.header_checks import check_max_rank, check_pair
from lora_weights.inventory import Inventory, PairEntries
from lora_weights.tensor_format import TensorEntry
from lora_weights.tensors import read_safetensors, write_safetensors

if TYPE_CHECKING:
    from pathlib import Path

    from lora_weights import Problem


def pair(
    shape_a: tuple[int, ...] = (4, 8),
    shape_b: tuple[int, ...] = (16, 4),
    *,
    module: str = "q_proj",
    is_embedding: bool = False,
) -> PairEntries:
    return PairEntries(
        module=module,
        stored_as=module,
        lora_a=TensorEntry("a", "F32", shape_a, 0, 4 * math.prod(shape_a)),
        lora_b=TensorEntry("b", "F32", shape_b, 0, 4 * math.prod(shape_b)),
        is_embedding=is_embedding,
    )


def finite(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> tuple[float, list[Problem]]:
    write_safetensors(tmp_path / "x", tensors)
    file, _ = read_safetensors(tmp_path / "x")
    assert file is not None
    return check_finite(file)


def test_a_pair_of_the_configured_rank_fits() -> None:
    assert check_pair(pair(), rank=4) == []


def test_an_embedding_is_named_by_its_own_parts() -> None:
    problems = check_pair(pair(is_embedding=True), rank=5)

    assert [problem.tensor for problem in problems] == ["lora_embedding_A", "lora_embedding_B"]


def test_each_place_of_a_rank_above_the_limit_is_named_once() -> None:
    config = AdapterConfig(r=8, lora_alpha=8.0, rank_pattern={"x": 16, "y": 2})
    stored = [pair((16, 8)), pair((32, 8), module="k_proj"), pair((2, 8), module="v_proj")]

    inventory = Inventory(
        modules=(),
        pairs=tuple(stored),
        experts={},
        shared={},
        base_copies={},
        duplicates=(),
        skipped=(),
        problems=(),
    )

    problems = check_max_rank(inventory, config, {}, max_rank=4)

    assert [(problem.module, problem.found) for problem in problems] == [
        ("", "rank 8"),
        ("", "rank 16"),
        ("k_proj", "rank 32"),
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_bound_is_at_least_the_largest_value(tmp_path: Path, dtype: torch.dtype) -> None:
    bound, problems = finite(tmp_path, {"a": torch.tensor([0.5, -3.0], dtype=dtype)})

    assert problems == []
    assert 3.0 <= bound <= 3.1


def test_squares_that_overflow_are_no_infinity(tmp_path: Path) -> None:
    bound, problems = finite(tmp_path, {"a": torch.tensor([3e38, -1.0])})

    assert problems == []
    assert bound == pytest.approx(3e38)


def test_every_tensor_with_a_bad_value_is_named(tmp_path: Path) -> None:
    bad = torch.tensor([1.0, math.nan])

    _, problems = finite(tmp_path, {"a": bad, "b": torch.ones(2), "c": -bad / 0, "d": bad.half()})

    assert sorted(problem.tensor for problem in problems) == ["a", "c", "d"]


def test_integers_are_never_not_finite(tmp_path: Path) -> None:
    assert finite(tmp_path, {"a": torch.ones(3, dtype=torch.int64)}) == (0.0, [])
