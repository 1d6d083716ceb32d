"""inspect_adapter: the same verdict as load_adapter, and what a user should know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from lora_weights import (
    AdapterError,
    InvalidAdapterError,
    ProblemCode,
    RawAdapter,
    inspect_adapter,
    load_adapter,
    save_adapter,
)
from lora_weights.testing import build_raw_adapter, llama_modules, write_adapter

if TYPE_CHECKING:
    from pathlib import Path

MODULES = llama_modules()


def test_a_good_adapter_is_described(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES, r=4, alpha=6, dtype=torch.bfloat16)

    report = inspect_adapter(folder)

    assert report.is_loadable
    assert report.problems == ()
    assert report.warnings == ()
    assert report.digest == load_adapter(folder).digest
    assert (report.rank, report.num_tensors) == (4, 28)
    assert [summary.module for summary in report.modules] == sorted(MODULES)
    assert {(m.scaling, m.dtype, m.is_embedding) for m in report.modules} == {(1.5, "BF16", False)}
    assert report.weights_bytes == load_adapter(folder).nbytes


def test_problems_are_those_that_load_adapter_raises(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES, r=4, use_dora=True, rank_pattern={"q_proj": 40})
    (folder / "adapter_model.safetensors").write_bytes(b"12345678" * 4)

    report = inspect_adapter(folder, max_rank=32)
    with pytest.raises(InvalidAdapterError) as caught:
        load_adapter(folder, max_rank=32)

    assert report.problems == caught.value.problems
    assert not report.is_loadable
    assert report.digest is None


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("/no/such/folder", ProblemCode.NOT_FOUND),
        ("s3://bucket/adapter", ProblemCode.UNREADABLE),
        ("", ProblemCode.NOT_FOUND),
    ],
)
def test_a_source_that_cannot_be_read_is_reported(source: str, code: ProblemCode) -> None:
    report = inspect_adapter(source)

    assert [problem.code for problem in report.problems] == [code]
    assert report.modules == ()


def test_pickle_without_permission_is_reported(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")

    report = inspect_adapter(folder)

    assert [problem.code for problem in report.problems] == [ProblemCode.UNSAFE_FORMAT]
    assert "adapter_model.bin" in str(report.problems[0])


def test_a_configuration_that_cannot_be_understood_still_gets_a_report(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES, peft_type="OFT")

    report = inspect_adapter(folder)

    assert report.config is None
    assert report.num_tensors == 28
    assert [problem.code for problem in report.problems] == [ProblemCode.UNSUPPORTED_TYPE]


def warnings_of(folder: Path) -> str:
    report = inspect_adapter(folder)
    assert report.is_loadable, report.problems
    return "\n".join(report.warnings)


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        (["q_proj"], "adapts modules outside"),
        (["layers.0.self_attn.q_proj", *llama_modules(num_layers=1)], "outside"),
        (r".*\.(q|v)_proj", "adapts modules outside"),
        ([*MODULES, "query_key_value"], "names modules without tensors: query_key_value"),
    ],
)
def test_a_disagreement_between_targets_and_tensors_is_a_warning(
    tmp_path: Path, targets: list[str] | str | None, text: str
) -> None:
    assert text in warnings_of(write_adapter(tmp_path, MODULES, target_modules=targets))


@pytest.mark.parametrize("targets", [None, "all-linear", r".*_proj", "(x+)+", list(MODULES)])
def test_targets_that_agree_or_say_nothing_are_no_warning(
    tmp_path: Path, targets: list[str] | str | None
) -> None:
    assert warnings_of(write_adapter(tmp_path, MODULES, target_modules=targets)) == ""


def test_files_that_are_not_read_are_mentioned(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES)
    for name in ("tokenizer_config.json", "chat_template.jinja", "non_lora_trainables.bin"):
        (folder / name).write_text("{}")

    text = warnings_of(folder)

    for name in ("tokenizer_config.json", "chat_template.jinja", "non_lora_trainables.bin"):
        assert name in text


def test_added_tokens_without_embeddings_are_nothing_special(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES)
    (folder / "added_tokens.json").write_text('{"<|im_start|>": 101}')

    assert warnings_of(folder) == ""


def test_copies_of_base_weights_and_changed_bases_are_mentioned(tmp_path: Path) -> None:
    raw = build_raw_adapter({"lm_head": (8, 16)}, init_lora_weights="lora_ga")
    copy = {"base_model.model.lm_head.base_layer.weight": torch.ones(16, 8)}
    folder = save_adapter(RawAdapter(config=raw.config, tensors={**raw.tensors, **copy}), tmp_path)

    text = warnings_of(folder)

    assert "copies of base weights (lm_head)" in text
    assert "LoRA-GA" in text


def test_mistakes_of_the_caller_are_not_part_of_a_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_rank") as caught:
        inspect_adapter(tmp_path, max_rank=0)

    assert not isinstance(caught.value, AdapterError)
