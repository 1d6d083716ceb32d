"""Matching an adapter with the model: every problem at once, and nothing of it dropped."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from lora_layers import AdapterMismatchError, LoraModelConfig, LoraModelManager
from lora_layers.testing import (
    LINEARS,
    PACKED_MODULES,
    BuiltAdapter,
    TinyDecoder,
    build_adapter,
    content_of,
)
from lora_weights import BaseCopy, LoraPair, ModulePart, ProblemCode, load_adapter
from lora_weights.testing import write_adapter

if TYPE_CHECKING:
    from pathlib import Path

    from lora_weights import Problem


def problems_of(manager: LoraModelManager, folder: Path) -> tuple[Problem, ...]:
    """Return what is wrong with the adapter in a folder."""
    with pytest.raises(AdapterMismatchError) as caught:
        manager.prepare(load_adapter(folder))
    return caught.value.problems


def test_pairs_are_sorted_into_slices_of_true_rank(
    manager: LoraModelManager, chat: BuiltAdapter
) -> None:
    prepared = manager.prepare(chat.adapter)

    assert set(prepared.contents) == {"layers.0.attn.qkv_proj", "layers.1.mlp.down_proj"}
    q, k, v = content_of(prepared, "layers.0.attn.qkv_proj").slices
    assert q is not None
    assert q[0].shape == (7, 16)
    assert k is None
    assert v is None
    assert prepared.rank == 7
    assert prepared.nbytes == 4 * 7 * (16 + 16 + 24 + 16)
    assert prepared.digest == chat.adapter.digest


def test_preparing_on_many_threads_gives_equal_results(
    manager: LoraModelManager, sql: BuiltAdapter
) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(manager.prepare, [sql.adapter] * 16))

    first = results[0]
    for other in results[1:]:
        assert list(other.contents) == list(first.contents)
        for path in first.contents:
            slices = content_of(first, path).slices
            for pair, others in zip(slices, content_of(other, path).slices, strict=True):
                assert pair is not None
                assert others is not None
                assert torch.equal(pair[1], others[1])


def test_all_problems_come_in_one_error_with_module_found_and_expected(
    manager: LoraModelManager, tmp_path: Path
) -> None:
    modules = {
        "layers.0.attn.q_proj": (16, 16),  # fits
        "layers.0.attn.o_proj": (16, 17),  # too many rows
        "layers.1.mlp.down_proj": (23, 16),  # too few columns
        "layers.9.attn.q_proj": (16, 16),  # no such layer
    }
    write_adapter(tmp_path, modules, r=4, rank_pattern={"layers.0.attn.q_proj": 9})

    problems = problems_of(manager, tmp_path)

    texts = sorted(str(problem) for problem in problems)
    assert len(texts) == 4
    assert "layers.0.attn.o_proj lora_B is [17, 4], expected [16, 4]" in texts[0]
    assert "layers.0.attn.q_proj lora_A is rank 9, expected at most 8" in texts[1]
    assert "layers.1.mlp.down_proj lora_A is [4, 23], expected [4, 24]" in texts[2]
    assert "layers.9.attn.q_proj" in texts[3]


def test_a_smaller_tensor_is_refused_not_copied_into_a_corner(
    manager: LoraModelManager, tmp_path: Path
) -> None:
    write_adapter(tmp_path, {"lm_head": (16, 31)}, r=4)

    (problem,) = problems_of(manager, tmp_path)

    assert problem.code is ProblemCode.SHAPE_MISMATCH
    assert "[31, 4]" in str(problem)
    assert "[32, 4]" in str(problem)


def test_modules_that_the_filter_left_out_are_refused_with_the_setting(tmp_path: Path) -> None:
    config = LoraModelConfig(
        target_modules=frozenset({"q_proj"}), packed_modules=PACKED_MODULES, max_lora_rank=8
    )
    manager = LoraModelManager(TinyDecoder(), config)
    names = ("attn.q_proj", "attn.k_proj", "mlp.down_proj")
    paths = [f"layers.0.{name}" for name in names]
    write_adapter(tmp_path / "some", {path: LINEARS[path] for path in paths}, r=4)
    write_adapter(tmp_path / "none", {paths[2]: LINEARS[paths[2]]}, r=4)

    some = problems_of(manager, tmp_path / "some")
    none = problems_of(manager, tmp_path / "none")

    assert [problem.module for problem in some] == paths[1:]
    assert [problem.module for problem in none] == paths[2:]
    assert all("target_modules ['q_proj']" in str(problem) for problem in (*some, *none))


def test_left_out_modules_are_named_beside_other_problems(tmp_path: Path) -> None:
    config = LoraModelConfig(target_modules=frozenset({"q_proj"}))
    manager = LoraModelManager(TinyDecoder(), config)
    modules = {"layers.0.attn.o_proj": (16, 16), "layers.0.attn.q_proj": (16, 99)}
    write_adapter(tmp_path, modules, r=4)

    problems = problems_of(manager, tmp_path)

    assert {p.module: p.code for p in problems} == {
        "layers.0.attn.o_proj": ProblemCode.UNKNOWN_MODULE,
        "layers.0.attn.q_proj": ProblemCode.SHAPE_MISMATCH,
    }


def test_tensors_for_a_module_that_cannot_carry_lora_are_refused_by_its_class(
    tmp_path: Path,
) -> None:
    model = nn.ModuleDict({"proj": nn.Linear(4, 4), "conv": nn.Conv1d(4, 4, 1)})
    manager = LoraModelManager(model, LoraModelConfig())
    write_adapter(tmp_path, {"proj": (4, 4), "conv": (4, 4)}, r=2)

    (problem,) = problems_of(manager, tmp_path)

    assert problem.module == "conv"
    assert "is a Conv1d" in str(problem)


def test_an_adapter_without_parts_or_with_zero_deltas_is_refused(
    manager: LoraModelManager, sql: BuiltAdapter
) -> None:
    zero = LoraPair(lora_a=torch.ones(4, 16), lora_b=torch.zeros(16, 4))
    for parts in ({}, {"layers.0.attn.q_proj": ModulePart(pair=zero)}):
        with pytest.raises(AdapterMismatchError, match="without effect") as caught:
            manager.prepare(replace(sql.adapter, parts=parts))
        assert caught.value.problems[0].code is ProblemCode.NO_EFFECT


def test_values_that_the_slots_dtype_cannot_hold_are_refused(sql: BuiltAdapter) -> None:
    config = LoraModelConfig(lora_dtype=torch.float16, max_lora_rank=8)
    manager = LoraModelManager(TinyDecoder(), config)
    pair = LoraPair(lora_a=torch.ones(4, 16), lora_b=torch.full((16, 4), 1e6))
    parts = {"layers.0.attn.q_proj": ModulePart(pair=pair)}

    with pytest.raises(AdapterMismatchError, match=r"lora_B of slice 0 is not finite as torch.flo"):
        manager.prepare(replace(sql.adapter, parts=parts))


def test_the_cast_to_the_slots_dtype_happens_once_after_the_scaling(sql: BuiltAdapter) -> None:
    config = LoraModelConfig(lora_dtype=torch.bfloat16, max_lora_rank=8)
    manager = LoraModelManager(TinyDecoder(), config)

    prepared = manager.prepare(sql.adapter)

    folded = sql.adapter.parts["lm_head"].pair
    pair = content_of(prepared, "lm_head").slices[0]
    assert folded is not None
    assert pair is not None
    assert torch.equal(pair[1], folded.lora_b.bfloat16())


def test_a_copy_of_the_base_table_counts_as_applied_only_when_it_is_equal(
    manager: LoraModelManager, model: TinyDecoder, sql: BuiltAdapter
) -> None:
    table = model.embed_tokens.weight
    key = "embed_tokens.base_layer.weight"
    same, other = (
        replace(sql.adapter, base_copies={"embed_tokens": BaseCopy(weights={key: copy})})
        for copy in (table.clone(), table + 1)
    )

    assert manager.prepare(same).rank == 4
    with pytest.raises(AdapterMismatchError, match=r"embed_tokens.base_layer.weight is"):
        manager.prepare(other)


def test_missing_members_of_a_packed_module_stay_absent(
    manager: LoraModelManager, tmp_path: Path
) -> None:
    paths = ["layers.0.attn.v_proj", "layers.1.attn.q_proj", "layers.1.mlp.up_proj"]

    prepared = manager.prepare(build_adapter(tmp_path, paths).adapter)

    present = {
        path: [pair is not None for pair in content_of(prepared, path).slices]
        for path in prepared.contents
    }
    assert present == {
        "layers.0.attn.qkv_proj": [False, False, True],
        "layers.1.attn.qkv_proj": [True, False, False],
        "layers.1.mlp.gate_up_proj": [False, True],
    }
