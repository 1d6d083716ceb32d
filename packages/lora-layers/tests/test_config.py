"""Limits, defaults, and all problems of a configuration at once."""

from __future__ import annotations

import pytest
import torch

from lora_layers import LayerConfigError, LoraModelConfig


def test_the_host_tier_holds_at_least_32_adapters_by_default() -> None:
    assert LoraModelConfig(max_loras=8).host_capacity == 32
    assert LoraModelConfig(max_loras=40).host_capacity == 40


def test_zero_host_places_mean_unset() -> None:
    assert LoraModelConfig(max_loras=4, max_cpu_loras=0).host_capacity == 32


def test_any_positive_rank_is_accepted() -> None:
    assert LoraModelConfig(max_lora_rank=13).max_lora_rank == 13


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"max_loras": 0}, "max_loras is 0, expected at least 1"),
        ({"max_lora_rank": -1}, "max_lora_rank is -1, expected at least 1"),
        ({"max_cpu_loras": -2}, "max_cpu_loras is -2"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras is 3, expected at least max_loras"),
        ({"max_host_bytes": 0}, "max_host_bytes is 0"),
        ({"lora_dtype": torch.int8}, "lora_dtype is torch.int8"),
        ({"packed_modules": {"qkv": ("q",)}}, "expected at least 2 different members"),
        ({"packed_modules": {"qkv": ("q", "q")}}, "expected at least 2 different members"),
        ({"packed_modules": {"a": ("q", "k"), "b": ("k", "v")}}, "'k' is in 'a' and in 'b'"),
        ({"packed_modules": {"a": ("b", "c"), "b": ("d", "e")}}, "'b' is both a group and a"),
        ({"packed_modules": {"a.b": ("c", "d")}}, "expected names without dots"),
        ({"fused_modules": {"a": {"b": 4}}}, "fused_modules['a'] is ['b'], expected at least 2"),
        ({"fused_modules": {"a": {"b": 4, "c": 0}}}, "fused_modules['a'] has 0 rows for 'c'"),
    ],
)
def test_a_value_out_of_range_is_refused_with_found_and_expected(
    values: dict[str, object], problem: str
) -> None:
    with pytest.raises(LayerConfigError) as caught:
        LoraModelConfig(**values)  # type: ignore[arg-type]

    assert len(caught.value.problems) == 1
    assert problem in str(caught.value)


def test_all_problems_come_in_one_error() -> None:
    with pytest.raises(LayerConfigError) as caught:
        LoraModelConfig(
            max_loras=0, max_lora_rank=0, max_cpu_loras=-1, packed_modules={"a": ("b",)}
        )

    assert len(caught.value.problems) == 4
