"""Rank, alpha and scaling per module, and the fold."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_weights import AdapterConfig
from lora_weights.scaling import (
    ModuleScaling,
    PatternTable,
    ScalingTable,
    fold_scaling_,
    pattern_fault,
)

Q = "model.layers.1.self_attn.q_proj"


def peft_lookup(patterns: dict[str, int], name: str) -> int | None:
    """PEFT's rule as documented: first pattern equal to a tail of the name from a dot on."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return None


def resolve(**fields: Any) -> ModuleScaling:
    return ScalingTable(AdapterConfig(**{"r": 8, "lora_alpha": 16.0, **fields})).resolve(Q)


def test_scaling_is_alpha_over_rank() -> None:
    assert resolve().scaling == 2.0


def test_rslora_divides_by_the_root_of_the_rank() -> None:
    assert resolve(r=64, lora_alpha=64.0, use_rslora=True).scaling == 8.0


def test_patterns_of_both_kinds_enter_the_scaling_of_their_module() -> None:
    found = resolve(rank_pattern={"q_proj": 32}, alpha_pattern={r"layers\.1\..*": 8.0})

    assert (found.rank, found.scaling) == (32, 0.25)


def test_pattern_rank_enters_the_root_of_rslora() -> None:
    found = resolve(rank_pattern={"q_proj": 16}, use_rslora=True)

    assert found.scaling == 16.0 / math.sqrt(16)


@pytest.mark.parametrize(
    ("patterns", "value"),
    [
        ({"q_proj": 1, Q: 2}, 1),
        ({Q: 2, "q_proj": 1}, 2),
        ({"proj": 1}, None),
        ({"elf_attn.q_proj": 1}, None),
        ({"self_attn.q_proj": 1}, 1),
        ({"self_attn.[qk]_proj": 1}, 1),
        ({r".*\.(q|v)_proj": 1}, 1),
        ({f"^{Q}": 1}, 1),
        ({"^self_attn.q_proj": 1}, None),
        ({"q_proj.x": 1}, None),
        ({"layers.0.self_attn.q_proj": 1}, None),
        # The dot of a plain path is the wildcard of a regular expression.
        ({"self.attn.q_proj": 1}, 1),
        ({"self.attn.q.proj": 1, "q_proj": 2}, 1),
        ({r".*q_proj": 1, "q_proj": 2}, 1),
        ({"q_proj": 2, r".*q_proj": 1}, 2),
    ],
)
def test_the_first_pattern_that_equals_a_tail_wins(
    patterns: dict[str, int], value: int | None
) -> None:
    assert PatternTable(patterns).lookup(Q) == value
    assert peft_lookup(patterns, Q) == value


@given(
    patterns=st.dictionaries(
        st.from_regex(r"[ab.]{1,5}|\(a\|b\)[.]b|b\.\*a", fullmatch=True),
        st.integers(),
        max_size=6,
    ),
    name=st.from_regex(r"[ab]{1,2}(\.[ab]{1,2}){0,3}", fullmatch=True),
)
def test_look_up_equals_a_regular_expression_per_pattern(
    patterns: dict[str, int], name: str
) -> None:
    assert PatternTable(patterns).lookup(name) == peft_lookup(patterns, name)


@pytest.mark.parametrize("pattern", ["(", "(a+)+", "(a|a)*b", "(.*.*){9}", ".*a.*b.*c.*d", "[a"])
def test_patterns_that_cannot_be_matched_in_bounded_time_are_faulted(pattern: str) -> None:
    assert pattern_fault(pattern) is not None


@pytest.mark.parametrize(
    "pattern", [Q, "q_proj", r".*\.(q|v)_proj", r"^model\.layers\.\d+\..*proj", "[qkv]_proj"]
)
def test_ordinary_patterns_have_no_fault(pattern: str) -> None:
    assert pattern_fault(pattern) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fold_rounds_the_exact_product_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    stored = torch.randn((64, 8), generator=generator).to(dtype)
    scaling = 10 / 3

    folded = fold_scaling_(stored.clone(), scaling)

    exact = stored.double() * scaling
    # Half a unit in the last place of the type, and that of the float32 product before it.
    bound = (torch.finfo(dtype).eps / 2 + torch.finfo(torch.float32).eps) * exact.abs()
    assert folded.dtype == dtype
    assert torch.all((folded.double() - exact).abs() <= bound)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scaling", [2.0, 10 / 3, 1 / 3, -0.7, 1e-3, 123.456, 1e10, 1.0000001])
def test_fold_of_every_narrow_value_is_the_float32_product_rounded(
    dtype: torch.dtype, scaling: float
) -> None:
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[torch.isfinite(values)]

    folded = fold_scaling_(values.clone(), scaling)

    expected = (values.to(torch.float32) * scaling).to(dtype)
    assert torch.equal(folded.view(torch.int16), expected.view(torch.int16))


def test_fold_with_scaling_one_changes_no_bit() -> None:
    stored = torch.randn((4, 4)).to(torch.bfloat16)

    assert torch.equal(fold_scaling_(stored.clone(), 1.0), stored)
