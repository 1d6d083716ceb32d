"""inspect_adapter: the same verdict as load_adapter, and what a user should know."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from lora_weights import (
    AdapterError,
    InvalidAdapterError,
    PartKind,
    ProblemCode,
    RawAdapter,
    inspect_adapter,
    load_adapter,
    save_adapter,
)
from lora_weights.tensor_format import build_header
from lora_weights.testing import build_raw_adapter, count_reads, llama_modules, write_adapter

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


def test_pairs_that_are_stacked_over_experts_are_described_without_a_base(tmp_path: Path) -> None:
    experts, rank, hidden, inner = 4, 3, 16, 8
    path = "base_model.model.model.layers.0.mlp.experts"
    stacked = {
        f"{path}.base_layer.lora_A.weight": torch.ones(experts * rank, hidden),
        f"{path}.base_layer.lora_B.weight": torch.ones(2 * inner, rank * experts),
        f"{path}.lora_A.weight": torch.ones(experts * rank, inner),
        f"{path}.lora_B.weight": torch.ones(hidden, rank * experts),
    }
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 6,
        "target_modules": [],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "peft_version": "0.19.1",
    }
    save_adapter(RawAdapter(config=config, tensors=stacked), tmp_path)

    report = inspect_adapter(tmp_path, read_tensors=False)

    assert report.problems == ()
    assert report.rank == rank
    assert [(m.kinds, m.rank, m.scaling, m.shape_a, m.shape_b) for m in report.modules] == [
        ((PartKind.EXPERTS,), rank, 2.0, (experts * rank, inner), (hidden, rank * experts)),
        ((PartKind.EXPERTS,), rank, 2.0, (experts * rank, hidden), (2 * inner, rank * experts)),
    ]


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
        ("ftp://host/adapter", ProblemCode.UNREADABLE),
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


def test_c20_c21_files_that_are_not_read_are_mentioned(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES)
    (folder / "tokenization.py").write_text("raise SystemExit('code from a folder ran')")
    for name in ("tokenizer_config.json", "chat_template.jinja", "non_lora_trainables.bin"):
        (folder / name).write_text('{"auto_map": {"AutoTokenizer": "tokenization.Tokenizer"}}')

    text = warnings_of(folder)

    assert "tokenizer and chat template are not used, the base's are" in text
    assert "code in the folder is never run (tokenization.py)" in text
    for name in ("tokenizer_config.json", "chat_template.jinja", "non_lora_trainables.bin"):
        assert name in text


def test_c19_added_tokens_without_embeddings_are_nothing_special(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("source", ["folder", "missing"])
def test_the_base_is_shown_where_it_is_known(tmp_path: Path, source: str) -> None:
    write_adapter(tmp_path / "folder", MODULES, base_model_name_or_path="org/base")

    base = inspect_adapter(tmp_path / source).base_model

    assert base == ("org/base" if source == "folder" else None)


def test_norms_are_those_of_the_full_update(tmp_path: Path) -> None:
    raw = build_raw_adapter(MODULES, r=4, alpha=6)

    report = inspect_adapter(save_adapter(raw, tmp_path))

    for summary in report.modules:
        a, b = (
            raw.tensors[f"base_model.model.{summary.module}.{name}.weight"].double()
            for name in ("lora_A", "lora_B")
        )
        assert summary.kinds == (PartKind.PAIR,)
        assert summary.nbytes == a.numel() * 4 + b.numel() * 4
        assert summary.update_norm == pytest.approx(
            float(torch.linalg.matrix_norm(1.5 * b @ a)), rel=1e-5
        )


def test_every_kind_of_part_is_named(tmp_path: Path) -> None:
    raw = build_raw_adapter(
        {"layers.0.q_proj": (8, 8), "layers.0.k_proj": (8, 8)},
        r=2,
        lora_bias=True,
        modules_to_save=["score"],
    )
    more = {
        "base_model.model.layers.0.q_proj.lora_B.bias": torch.full((8,), 0.5),
        "base_model.model.layers.0.k_proj.lora_B.bias": torch.zeros(8),
        "base_model.model.score.weight": torch.ones(3, 8),
    }
    raw = RawAdapter(config=raw.config, tensors={**raw.tensors, **more})

    report = inspect_adapter(save_adapter(raw, tmp_path))

    assert report.is_loadable, report.problems
    kinds = {summary.module: summary.kinds for summary in report.modules}
    assert kinds["score"] == (PartKind.FULL,)
    assert set(kinds["layers.0.q_proj"]) == {PartKind.PAIR, PartKind.LORA_BIAS}
    norms = {summary.module: summary.norms for summary in report.modules}
    # alpha / r is 2, and the bias is scaled with the pair.
    assert norms["layers.0.q_proj"][PartKind.LORA_BIAS] == pytest.approx(2 * 0.5 * 8**0.5)
    assert norms["score"] == {}


def test_headers_alone_give_names_shapes_ranks_and_sizes(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES, r=4, alpha=6, dtype=torch.bfloat16)

    whole = inspect_adapter(folder)
    report = inspect_adapter(folder, read_tensors=False)

    assert report.problems == ()
    assert (report.numbers_read, report.is_loadable, report.digest) == (False, False, None)
    assert [replace(m, norms={}) for m in whole.modules] == list(report.modules)
    assert (report.num_tensors, report.weights_bytes) == (28, whole.weights_bytes)
    assert [text for text in report.warnings if "only headers were read" in text]
    assert whole.numbers_read


def test_headers_alone_show_what_a_header_can(tmp_path: Path) -> None:
    raw = build_raw_adapter(MODULES, r=4)
    extra = {"base_model.model.x.unknown": torch.ones(2)}
    raw = RawAdapter(
        config={**raw.config, "r": 8, "use_qalora": True}, tensors={**raw.tensors, **extra}
    )

    folder = save_adapter(raw, tmp_path)
    report = inspect_adapter(folder, read_tensors=False, max_rank=2)

    assert report.problems == inspect_adapter(folder, max_rank=2).problems
    assert {problem.code for problem in report.problems} >= {
        ProblemCode.SHAPE_MISMATCH,
        ProblemCode.RANK_TOO_LARGE,
        ProblemCode.UNSUPPORTED_FIELD,
    }


def test_tensor_data_is_never_read_for_headers(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES, r=4)

    with count_reads() as of_headers:
        report = inspect_adapter(folder, read_tensors=False)
    with count_reads() as of_all:
        inspect_adapter(folder)

    assert report.num_tensors == 28
    assert of_headers == set()
    assert len(of_all) == report.weights_bytes


def test_a_file_larger_than_memory_is_inspected_by_its_header(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES, r=4)
    path = folder / "adapter_model.safetensors"
    size = 2**43  # bytes; a hole, which takes no place on the disk
    header = build_header(
        (f"base_model.model.{m}.lora_{ab}.weight", "F32", shape, size)
        for m, size, ab, shape in (("q_proj", size, "A", (4, size // 16)),)
    )
    path.write_bytes(header)
    os.truncate(path, len(header) + size)

    report = inspect_adapter(folder, read_tensors=False)
    whole = inspect_adapter(folder)

    assert report.weights_bytes == size
    assert [problem.code for problem in report.problems] == [ProblemCode.INCOMPLETE_PAIR]
    assert "max_bytes" in str(whole.problems[0])


def test_a_pickle_has_no_header_to_read(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")

    report = inspect_adapter(folder, read_tensors=False, allow_pickle=True)

    assert "a pickle, which has no header" in str(report.problems[0])


def test_tensors_without_elements_are_explained(tmp_path: Path) -> None:
    raw = build_raw_adapter(MODULES)
    empty = {key: torch.zeros(0) for key in raw.tensors}

    report = inspect_adapter(
        save_adapter(RawAdapter(config=raw.config, tensors=empty), tmp_path), read_tensors=False
    )

    assert "ZeRO-3" in "\n".join(report.warnings)


def test_files_beside_the_one_that_is_read_are_mentioned(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES)
    (folder / "adapter_model-00001-of-00002.safetensors").write_bytes(b"")

    assert "the files beside it are not (adapter_model-00001" in warnings_of(folder)
