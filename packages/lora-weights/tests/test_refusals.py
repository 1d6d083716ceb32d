"""Adapters that cannot be used: each refused with its reasons, and with all of them."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch

from lora_weights import (
    AdapterNotFoundError,
    InvalidAdapterError,
    ProblemCode,
    SourceError,
    load_adapter,
    save_adapter,
)
from lora_weights.save import RawAdapter
from lora_weights.testing import build_raw_adapter, llama_modules, write_adapter

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from lora_weights import Problem

MODULES = llama_modules()
Q = "model.layers.0.self_attn.q_proj"
A = f"base_model.model.{Q}.lora_A.weight"
B = f"base_model.model.{Q}.lora_B.weight"


def changed(
    raw: RawAdapter,
    *,
    drop: Collection[str] = (),
    add: dict[str, torch.Tensor] | None = None,
    **config: object,
) -> RawAdapter:
    tensors = {key: tensor for key, tensor in raw.tensors.items() if key not in drop}
    return RawAdapter(config={**raw.config, **config}, tensors={**tensors, **(add or {})})


def problems_of(folder: Path, **arguments: Any) -> tuple[Problem, ...]:
    with pytest.raises(InvalidAdapterError) as caught:
        load_adapter(folder, **arguments)
    assert caught.value.source == str(folder)
    return caught.value.problems


def refused(tmp_path: Path, raw: RawAdapter, **arguments: Any) -> tuple[Problem, ...]:
    return problems_of(save_adapter(raw, tmp_path / "bad"), **arguments)


def test_a_missing_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFoundError):
        load_adapter(tmp_path / "nothing")


def test_a_folder_that_may_not_be_read_is_a_source_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path, MODULES)

    def refuse(self: Path) -> NoReturn:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)

    with pytest.raises(SourceError, match="Permission denied"):
        load_adapter(folder)


def test_a_configuration_without_weights_names_what_was_searched(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES)
    (folder / "adapter_model.safetensors").unlink()

    problems = problems_of(folder)

    assert [problem.code for problem in problems] == [ProblemCode.MISSING_WEIGHTS]
    assert "adapter_model.safetensors, adapter_model.bin, adapter_model.pt" in str(problems[0])


def test_a_sharded_checkpoint_is_refused_by_its_files(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES)
    shard = "adapter_model-00001-of-00004.safetensors"
    (folder / "adapter_model.safetensors").rename(folder / shard)

    problems = problems_of(folder)

    assert [problem.code for problem in problems] == [ProblemCode.SHARDED]
    assert shard in problems[0].found


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git-lfs"),
        (b"PK\x03\x04\x14\x00\x08\x08" + bytes(100), "not safetensors"),
        (struct.pack("<Q", 5) + b"{}", "10 bytes long"),
    ],
)
def test_a_weight_file_that_is_none_is_named(tmp_path: Path, content: bytes, found: str) -> None:
    folder = write_adapter(tmp_path, MODULES)
    (folder / "adapter_model.safetensors").write_bytes(content)

    problems = problems_of(folder)

    assert [problem.code for problem in problems] == [ProblemCode.WEIGHTS_UNREADABLE]
    assert found in str(problems[0])


def test_a_half_written_file_is_refused_with_both_sizes(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, MODULES) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])

    problems = problems_of(tmp_path)

    assert "it is cut off" in str(problems[0])


def test_configuration_and_file_problems_come_together(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES, use_qalora=True)
    (folder / "adapter_model.safetensors").write_bytes(b"")

    codes = [problem.code for problem in problems_of(folder)]

    assert codes == [ProblemCode.UNSUPPORTED_FIELD, ProblemCode.WEIGHTS_UNREADABLE]


def test_a_rank_that_differs_from_the_configuration_names_module_found_and_expected(
    tmp_path: Path,
) -> None:
    raw = changed(build_raw_adapter({Q: (64, 64)}, r=4), r=16)

    texts = [str(problem) for problem in refused(tmp_path, raw)]

    assert texts == [
        f"{Q} lora_A is [4, 64], expected [16, I] (rank 16 by adapter_config.json)",
        f"{Q} lora_B is [64, 4], expected [O, 16] (rank 16 by adapter_config.json)",
    ]


def test_a_and_b_of_different_ranks_are_refused(tmp_path: Path) -> None:
    raw = changed(build_raw_adapter({Q: (64, 64)}, r=8), add={B: torch.ones(64, 4)})

    problems = refused(tmp_path, raw)

    assert [(problem.tensor, problem.found) for problem in problems] == [("lora_B", "[64, 4]")]


@pytest.mark.parametrize("shape", [(8,), (8, 64, 1, 1), (8, 0), ()])
def test_a_factor_that_is_no_matrix_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    raw = changed(build_raw_adapter(MODULES, r=8), add={A: torch.ones(shape)})

    problems = refused(tmp_path, raw)

    assert [problem.code for problem in problems] == [ProblemCode.SHAPE_MISMATCH]


def test_ranks_above_the_limit_are_named_with_both_numbers(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES, r=8, rank_pattern={Q: 32})

    problems = problems_of(folder, max_rank=16)

    assert [(problem.found, problem.expected) for problem in problems] == [
        ("rank 32", "at most 16")
    ]
    assert load_adapter(folder, max_rank=32).rank == 32


def test_a_declared_rank_above_the_limit_is_refused_too(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, {Q: (64, 64)}, r=64, rank_pattern={"q_proj": 4})

    problems = problems_of(folder, max_rank=16)

    assert [problem.tensor for problem in problems] == ["adapter_config.json r"]


@pytest.mark.parametrize("drop", [A, B])
def test_half_a_pair_is_refused(tmp_path: Path, drop: str) -> None:
    problems = refused(tmp_path, changed(build_raw_adapter(MODULES), drop=[drop]))

    assert [(problem.code, problem.module) for problem in problems] == [
        (ProblemCode.INCOMPLETE_PAIR, Q)
    ]


def test_keys_that_become_equal_without_their_prefix_are_refused(tmp_path: Path) -> None:
    raw = changed(
        build_raw_adapter(MODULES), add={A.removeprefix("base_model.model."): torch.ones(1)}
    )

    problems = refused(tmp_path, raw)

    assert ProblemCode.DUPLICATE_TENSOR in [problem.code for problem in problems]


def test_two_adapter_names_in_one_file_are_refused(tmp_path: Path) -> None:
    raw = build_raw_adapter(MODULES)
    other = A.replace(".weight", ".other.weight")
    raw = changed(raw, drop=[A], add={other: raw.tensors[A]})

    problems = refused(tmp_path, raw)

    assert [problem.code for problem in problems] == [ProblemCode.MIXED_NAMES]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_value_that_is_no_number_names_its_tensor_and_count(
    tmp_path: Path, value: Any, dtype: torch.dtype
) -> None:
    raw = build_raw_adapter(MODULES, dtype=dtype)
    raw.tensors[B][3, 2:4] = value

    problems = refused(tmp_path, raw)

    assert [(problem.code, problem.tensor) for problem in problems] == [(ProblemCode.NOT_FINITE, B)]
    assert "2 of 512 values" in problems[0].found


def test_huge_finite_values_pass_in_float32_and_are_refused_in_float16(tmp_path: Path) -> None:
    raw = build_raw_adapter({"q_proj": (8, 8)}, r=2, alpha=2)
    raw.tensors["base_model.model.q_proj.lora_B.weight"][0, 0] = 3e30
    folder = save_adapter(raw, tmp_path)

    problems = problems_of(folder, dtype=torch.float16)

    assert load_adapter(folder).rank == 2
    assert [problem.code for problem in problems] == [ProblemCode.NOT_FINITE]
    assert "range of torch.float16" in problems[0].found


def test_a_product_that_leaves_the_range_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, {"q_proj": (8, 8)}, dtype=torch.float16, alpha=1e7)

    problems = problems_of(folder)

    assert [(problem.code, problem.tensor) for problem in problems] == [
        (ProblemCode.NOT_FINITE, "lora_B")
    ]


def test_zero_b_everywhere_is_refused(tmp_path: Path) -> None:
    raw = build_raw_adapter(MODULES)
    zeros = {key: t * 0 for key, t in raw.tensors.items() if "lora_B" in key}

    problems = refused(tmp_path, changed(raw, add=zeros))

    assert [problem.code for problem in problems] == [ProblemCode.NO_EFFECT]


def test_one_module_with_an_effect_is_enough(tmp_path: Path) -> None:
    raw = build_raw_adapter(MODULES)
    zeros = {key: t * 0 for key, t in raw.tensors.items() if "lora_B" in key and key != B}

    adapter = load_adapter(save_adapter(changed(raw, add=zeros), tmp_path))

    assert len(adapter.parts) == len(MODULES)


@pytest.mark.parametrize(
    ("std", "config", "dtype"),
    [(0.0, {}, None), (0.5, {"lora_alpha": 0}, None), (1e-12, {}, torch.float16)],
    ids=["zero", "alpha 0", "underflow"],
)
def test_other_ways_to_change_nothing_are_refused(
    tmp_path: Path, std: float, config: dict[str, Any], dtype: torch.dtype | None
) -> None:
    folder = write_adapter(tmp_path, MODULES, std=std, **config)

    assert [p.code for p in problems_of(folder, dtype=dtype)] == [ProblemCode.NO_EFFECT]


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    problems = refused(tmp_path, RawAdapter(config=build_raw_adapter({}).config, tensors={}))

    assert [problem.code for problem in problems] == [ProblemCode.NO_EFFECT]


def test_base_tensors_alone_are_each_named(tmp_path: Path) -> None:
    raw = RawAdapter(
        config=build_raw_adapter({}).config,
        tensors={"model.q_proj.weight": torch.ones(2, 2), "lm_head.weight": torch.ones(2, 2)},
    )

    problems = refused(tmp_path, raw)

    assert sorted(problem.tensor for problem in problems) == sorted(raw.tensors)


@pytest.mark.parametrize(
    ("key", "code"),
    [
        (f"{Q}.lora_magnitude_vector", ProblemCode.UNSUPPORTED_TENSOR),
        (f"{Q}.lora_B.bias", ProblemCode.UNSUPPORTED_TENSOR),
        (f"{Q}.bias", ProblemCode.UNSUPPORTED_TENSOR),
        (f"{Q}.weight", ProblemCode.UNSUPPORTED_TENSOR),
        ("unheard_of.weight", ProblemCode.UNSUPPORTED_TENSOR),
        ("k.base_layer.weight", ProblemCode.UNSUPPORTED_TENSOR),
        (f"{Q}.lora_E", ProblemCode.UNSUPPORTED_TENSOR),
        (f"{Q}.ia3_l", ProblemCode.UNSUPPORTED_TENSOR),
        (f"{Q}.hada_w1_a", ProblemCode.UNSUPPORTED_TENSOR),
        (f"{Q}.lora_velora_embed", ProblemCode.UNSUPPORTED_TENSOR),
        ("prompt_embeddings", ProblemCode.UNSUPPORTED_TENSOR),
        ("x" * 300, ProblemCode.UNSUPPORTED_TENSOR),
        (f"{Q}.lora_down.weight", ProblemCode.FOREIGN_FORMAT),
        (f"{Q}.alpha", ProblemCode.FOREIGN_FORMAT),
    ],
)
def test_a_tensor_that_is_not_applied_is_named(tmp_path: Path, key: str, code: ProblemCode) -> None:
    name = f"base_model.model.{key}"

    problems = refused(tmp_path, changed(build_raw_adapter(MODULES), add={name: torch.ones(64)}))

    assert [problem.code for problem in problems] == [code]
    assert key[:40] in problems[0].tensor


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_types_that_are_no_factors_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = build_raw_adapter(MODULES)

    problems = refused(tmp_path, changed(raw, add={A: raw.tensors[A].to(dtype)}))

    assert [problem.code for problem in problems] == [ProblemCode.UNSUPPORTED_DTYPE]


@pytest.mark.parametrize(("name", "value"), [("dtype", torch.int8), ("max_rank", 0)])
def test_arguments_that_cannot_be_met_are_the_callers_mistake(
    tmp_path: Path, name: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=name):
        load_adapter(write_adapter(tmp_path, MODULES), **{name: value})
