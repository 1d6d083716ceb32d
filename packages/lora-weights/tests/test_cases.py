"""Cases from public bug reports that a file alone can show, each a test that names its case.

Where they are tested (other files' tests carry the case in their name too):

    C02 prefixes            here, test_paths         C16 nested adapters       here
    C03 regex, towers       here, test_paths         C17 whole matrices        test_format*
    C04 names in keys       here, test_formats       C18 copies of the base    test_format_refusals
    C05 no adapter folder   test_folder, test_hub    C19 added tokens          test_report
    C09 rsLoRA              here                     C20 C21 tokenizer         test_report
    C10 raw alpha           here                     C22 tied heads            test_token_rows,
    C11 ranks               here                         integration_tests/test_weights_formats
    C12 layers              here, test_experts_*     C23 heads, labels         test_format_refusals
    C13 DoRA                test_format*             C24 backbone names        test_paths
    C14 biases              test_format*             C25-C33 fused, experts    test_packing_fused,
    C15 targets             here                         test_experts_*, test_sharding
    C48 C49 C64 files       test_checkpoint          C62 same as PEFT          here, integration
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lora_weights import (
    InvalidAdapterError,
    ModuleShape,
    ProblemCode,
    RawAdapter,
    bind_adapter,
    inspect_adapter,
    load_adapter,
    save_adapter,
)
from lora_weights.testing import build_raw_adapter, llama_modules, pair_of, write_adapter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lora_weights import Problem

MODULES = llama_modules()
SHAPES = {
    path: ModuleShape(in_features=size[0], out_features=size[1]) for path, size in MODULES.items()
}
Q = "model.layers.0.self_attn.q_proj"
A, B = (f"base_model.model.{Q}.lora_{part}.weight" for part in "AB")


def renamed(raw: RawAdapter, change: Callable[[str], str]) -> RawAdapter:
    return RawAdapter(
        config=raw.config, tensors={change(key): tensor for key, tensor in raw.tensors.items()}
    )


def refused(raw: RawAdapter, folder: Path, **arguments: Any) -> tuple[Problem, ...]:
    with pytest.raises(InvalidAdapterError) as caught:
        load_adapter(save_adapter(raw, folder), **arguments)
    return caught.value.problems


@pytest.mark.parametrize(
    "prefix",
    ["base_model.model.", "base_model.model.model.model.", "", "base_model.model._orig_mod.model."],
)
def test_c02_one_model_too_few_or_too_many_gives_the_same_parts(
    prefix: str, tmp_path: Path
) -> None:
    raw = build_raw_adapter(MODULES, r=4)
    expected = load_adapter(save_adapter(raw, tmp_path / "plain"))

    spelled = renamed(raw, lambda key: key.replace("base_model.model.model.", prefix))
    adapter = load_adapter(save_adapter(spelled, tmp_path / "spelled"))

    bound = bind_adapter(adapter, SHAPES, max_rank=4)
    assert bound.keys() == expected.parts.keys()
    for path in MODULES:
        ours, theirs = pair_of(bound, path), pair_of(expected.parts, path)
        assert torch.equal(ours.lora_a, theirs.lora_a)
        assert torch.equal(ours.lora_b, theirs.lora_b)


def test_c03_a_regular_expression_of_a_multimodal_class_is_no_filter(tmp_path: Path) -> None:
    text = {f"model.language_model.layers.0.{name}": (8, 8) for name in ("q_proj", "up_proj")}
    raw = build_raw_adapter(
        {**text, "model.vision_tower.layers.0.q_proj": (8, 8)},
        target_modules=r"(.*(language_model).*(q_proj|up_proj).*$)",
        auto_mapping={"base_model_class": "X", "parent_library": "y", "extra": True},
    )
    shapes = {path: ModuleShape(in_features=8, out_features=8) for path in text}

    with pytest.raises(InvalidAdapterError) as caught:
        bind_adapter(load_adapter(save_adapter(raw, tmp_path)), shapes, max_rank=8)

    assert [p.module for p in caught.value.problems] == ["model.vision_tower.layers.0.q_proj"]


@pytest.mark.parametrize("name", ["default", "lora", "lora_A", "weight_v2"])
def test_c04_the_training_time_name_in_the_keys_changes_nothing(name: str, tmp_path: Path) -> None:
    raw = build_raw_adapter(MODULES)

    infixed = renamed(raw, lambda key: key.replace(".weight", f".{name}.weight"))

    assert (
        load_adapter(save_adapter(infixed, tmp_path / "a")).digest
        == load_adapter(save_adapter(raw, tmp_path / "b")).digest
    )


def test_c04_two_names_in_one_file_are_refused(tmp_path: Path) -> None:
    raw = build_raw_adapter(MODULES)

    mixed = renamed(
        raw,
        lambda key: key.replace(".weight", f".{'one' if 'layers.0' in key else 'two'}.weight"),
    )

    assert [p.code for p in refused(mixed, tmp_path)] == [ProblemCode.MIXED_NAMES]


def test_c04_a_module_called_lora_something_is_an_ordinary_one(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, {"model.lora_gate.q_proj": (8, 8)})

    assert list(load_adapter(folder).parts) == ["model.lora_gate.q_proj"]


@pytest.mark.parametrize("rank", [8, 12, 64])
def test_c09_rslora_divides_by_the_root_of_the_modules_own_rank(rank: int, tmp_path: Path) -> None:
    raw = build_raw_adapter({Q: (64, 64)}, r=rank, alpha=16, use_rslora=True)
    twin = RawAdapter(
        config={**raw.config, "use_rslora": False, "lora_alpha": 16 * math.sqrt(rank)},
        tensors=raw.tensors,
    )

    pairs = [
        pair_of(load_adapter(save_adapter(one, tmp_path / str(index))).parts, Q)
        for index, one in enumerate((raw, twin))
    ]

    torch.testing.assert_close(pairs[0].lora_b, raw.tensors[B] * (16 / math.sqrt(rank)))
    torch.testing.assert_close(pairs[0].lora_b, pairs[1].lora_b)


def test_c10_alpha_is_divided_by_the_rank(tmp_path: Path) -> None:
    raw = build_raw_adapter({Q: (64, 64)}, r=8, alpha=16)

    pair = pair_of(load_adapter(save_adapter(raw, tmp_path)).parts, Q)

    assert torch.equal(pair.lora_b, raw.tensors[B] * 2)


def test_c10_another_tools_layout_is_named_and_never_guessed(tmp_path: Path) -> None:
    raw = build_raw_adapter({})
    foreign = RawAdapter(
        config=raw.config,
        tensors={
            f"{Q}.lora_down.weight": torch.ones(4, 64),
            f"{Q}.lora_up.weight": torch.ones(64, 4),
            f"{Q}.alpha": torch.tensor(4.0),
        },
    )

    problems = refused(foreign, tmp_path)

    assert {p.code for p in problems} == {ProblemCode.FOREIGN_FORMAT}
    assert [p.tensor for p in problems] == sorted(foreign.tensors)


def test_c11_a_declared_rank_that_is_not_the_stored_one_is_refused(tmp_path: Path) -> None:
    raw = build_raw_adapter({Q: (64, 64)}, r=4)

    problems = refused(RawAdapter(config={**raw.config, "r": 16}, tensors=raw.tensors), tmp_path)

    assert {p.code for p in problems} == {ProblemCode.SHAPE_MISMATCH}


def test_c11_the_largest_stored_rank_is_compared_with_the_limit(tmp_path: Path) -> None:
    raw = build_raw_adapter(MODULES, r=8, rank_pattern={Q: 32})

    problems = refused(raw, tmp_path, max_rank=16)

    assert [(p.found, p.expected) for p in problems] == [("rank 32", "at most 16")]


def test_c11_factors_of_different_ranks_are_refused(tmp_path: Path) -> None:
    raw = build_raw_adapter({Q: (64, 64)}, r=8)

    problems = refused(
        RawAdapter(config=raw.config, tensors={**raw.tensors, B: torch.ones(64, 4)}), tmp_path
    )

    assert [(p.tensor, p.found) for p in problems] == [("lora_B", "[64, 4]")]


@pytest.mark.parametrize("pattern", [None, [], "", "layers", "h", ["layers", "h"]])
def test_c12_layers_to_transform_filters_nothing(pattern: object, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES, layers_to_transform=[1], layers_pattern=pattern)

    assert load_adapter(folder).parts.keys() == MODULES.keys()


@pytest.mark.parametrize(
    "targets",
    [
        r".*\\.(q|v)_proj",
        "all-linear",
        None,
        [],
        ["q_proj", "query_key_value"],
        ["q_proj", "q_proj", "v_proj"],
        ["self_attn.q_proj"],
        "(((a+)+)+)+$",
    ],
)
@pytest.mark.parametrize("excluded", [None, r".*q_proj", ["q_proj"]])
def test_c15_target_modules_of_any_form_load_whatever_the_file_holds(
    targets: object, excluded: object, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path, MODULES, target_modules=targets, exclude_modules=excluded)

    assert load_adapter(folder).parts.keys() == MODULES.keys()


def test_c15_modules_outside_the_targets_are_a_warning_of_the_report(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES, target_modules=r".*\.(q|v)_proj")

    report = inspect_adapter(folder)

    assert report.is_loadable
    assert any(
        "outside" in str(warning) and "k_proj" in str(warning) for warning in report.warnings
    )


def test_c16_a_pair_inside_another_pairs_layer_is_refused(tmp_path: Path) -> None:
    k_proj = Q.replace("q_proj", "k_proj")
    raw = build_raw_adapter({k_proj: (64, 32), f"{k_proj}.base_layer": (64, 32)})

    problems = refused(raw, tmp_path)

    assert [(p.code, p.module) for p in problems] == [
        (ProblemCode.NESTED_ADAPTER, f"{k_proj}.base_layer")
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-4, 1e2])
def test_c62_a_file_is_cast_once_after_the_scaling_in_float32(
    dtype: torch.dtype, size: float, tmp_path: Path
) -> None:
    raw = build_raw_adapter({Q: (64, 64)}, r=3, alpha=5, dtype=dtype, std=size)

    pair = pair_of(load_adapter(save_adapter(raw, tmp_path), dtype=torch.bfloat16).parts, Q)

    assert torch.equal(pair.lora_a, raw.tensors[A].bfloat16())
    assert torch.equal(pair.lora_b, (raw.tensors[B].float() * (5 / 3)).bfloat16())
