"""Weight files that are broken, hostile, or being written: each refused with its reason."""

from __future__ import annotations

import json
import pickle
import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lora_weights import (
    InvalidAdapterError,
    ProblemCode,
    RawAdapter,
    UnsafeFormatError,
    inspect_adapter,
    load_adapter,
    save_adapter,
)
from lora_weights.json_object import MAX_JSON_BYTES
from lora_weights.tensors import read_data, write_safetensors
from lora_weights.testing import build_raw_adapter, llama_modules, write_adapter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lora_weights import Problem

MODULES = llama_modules()
WEIGHTS = "adapter_model.safetensors"


def problems_of(folder: Path, **arguments: Any) -> tuple[Problem, ...]:
    with pytest.raises(InvalidAdapterError) as caught:
        load_adapter(folder, **arguments)
    report = inspect_adapter(folder, **arguments)
    assert report.problems == caught.value.problems
    return caught.value.problems


def header_of(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    return header


def with_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a file again with another header and the same data."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    text = json.dumps(change(header) or header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path, MODULES, r=4)


def test_c48_a_file_of_40_bytes_without_tensors_names_zero3(folder: Path) -> None:
    write_safetensors(folder / WEIGHTS, {})

    problems = problems_of(folder)

    assert (folder / WEIGHTS).stat().st_size == 40
    assert [(p.code, p.tensor) for p in problems] == [(ProblemCode.NO_EFFECT, WEIGHTS)]
    assert "ZeRO-3" in problems[0].expected


@pytest.mark.parametrize("kinds", [("lora_A", "lora_B"), ("lora_B",)], ids=["all", "only B"])
def test_c48_tensors_without_elements_are_named(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    raw = build_raw_adapter(MODULES, r=4)
    empty = {
        key: torch.zeros(0) if any(kind in key for kind in kinds) else tensor
        for key, tensor in raw.tensors.items()
    }

    problems = problems_of(save_adapter(RawAdapter(config=raw.config, tensors=empty), tmp_path))

    codes = {p.code for p in problems}
    named = {(p.module, p.tensor) for p in problems if p.code is ProblemCode.SHAPE_MISMATCH}
    assert named == {(path, kind) for path in MODULES for kind in kinds}
    assert codes <= {ProblemCode.SHAPE_MISMATCH, ProblemCode.NO_EFFECT}


def test_c48_a_truncated_file_is_cut_off(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])

    problems = problems_of(folder)

    assert [p.code for p in problems] == [ProblemCode.WEIGHTS_UNREADABLE]
    assert "cut off" in problems[0].expected


@pytest.mark.parametrize("length", [2**60, 2**63, 2**64 - 1, 100_000_001])
def test_c48_a_header_length_is_never_allocated(folder: Path, length: int) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", length) + content[8:])

    tracemalloc.start()
    problems = problems_of(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert [p.code for p in problems] == [ProblemCode.WEIGHTS_UNREADABLE]
    assert peak < 2**21


def test_c48_a_size_in_the_header_is_never_allocated(folder: Path) -> None:
    def grow(header: dict[str, Any]) -> None:
        key = max(key for key in header if key != "__metadata__")
        header[key]["shape"] = [2**20, 2**30]
        header[key]["data_offsets"][1] = header[key]["data_offsets"][0] + 2**52

    with_header(folder / WEIGHTS, grow)

    tracemalloc.start()
    problems = problems_of(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert [p.code for p in problems] == [ProblemCode.WEIGHTS_UNREADABLE]
    assert peak < 2**21


def test_c48_tensors_that_overlap_are_named(folder: Path) -> None:
    def overlap(header: dict[str, Any]) -> None:
        keys = [key for key in header if key != "__metadata__"]
        same = [key for key in keys if header[key]["shape"] == header[keys[0]]["shape"]]
        header[same[1]]["data_offsets"] = header[same[0]]["data_offsets"]

    with_header(folder / WEIGHTS, overlap)

    assert "starts at byte" in problems_of(folder)[0].found


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_c48_numbers_that_are_none_are_named_with_their_count(tmp_path: Path, value: float) -> None:
    raw = build_raw_adapter(MODULES, r=4)
    key = min(raw.tensors)
    raw.tensors[key][0, :3] = value

    problems = problems_of(save_adapter(raw, tmp_path))

    assert [(p.code, p.tensor) for p in problems] == [(ProblemCode.NOT_FINITE, key)]
    assert "in 3 of" in problems[0].found


def test_c48_every_b_zero_is_refused_and_one_b_zero_is_not(tmp_path: Path) -> None:
    raw = build_raw_adapter(MODULES, r=4)
    zero_b = [key for key in raw.tensors if "lora_B" in key]
    all_zero = {k: t * 0 if k in zero_b else t for k, t in raw.tensors.items()}
    one_zero = {k: t * 0 if k == zero_b[0] else t for k, t in raw.tensors.items()}

    problems = problems_of(
        save_adapter(RawAdapter(config=raw.config, tensors=all_zero), tmp_path / "all")
    )
    kept = save_adapter(RawAdapter(config=raw.config, tensors=one_zero), tmp_path / "one")

    assert [p.code for p in problems] == [ProblemCode.NO_EFFECT]
    assert set(load_adapter(kept).parts) == set(MODULES)


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS])
def test_a_git_lfs_pointer_is_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")

    assert "git lfs pull" in str(problems_of(folder)[0])


def test_a_configuration_that_names_a_key_twice_is_refused(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace('"r": 4', '"r": 4, "r": 8'))

    assert "'r' twice" in problems_of(folder)[0].found


def test_text_that_cannot_be_printed_is_refused(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace("tiny-random-model", "\\ud800"))

    assert [p.code for p in problems_of(folder)] == [ProblemCode.CONFIG_UNREADABLE]


def test_a_huge_configuration_is_not_read(folder: Path) -> None:
    with (folder / "adapter_config.json").open("r+b") as stream:
        stream.truncate(MAX_JSON_BYTES + 1)

    assert f"at most {MAX_JSON_BYTES}" in str(problems_of(folder)[0])


def test_weights_above_the_limit_are_refused_before_they_are_read(folder: Path) -> None:
    size = load_adapter(folder).nbytes

    problems = problems_of(folder, max_bytes=size - 1)

    assert [p.code for p in problems] == [ProblemCode.WEIGHTS_UNREADABLE]
    assert (problems[0].found, problems[0].expected) == (
        f"{size} bytes",
        f"at most {size - 1} (max_bytes)",
    )
    assert load_adapter(folder, max_bytes=size).nbytes == size


def test_a_full_models_weights_beside_a_configuration_are_named(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model.safetensors")

    problems = problems_of(folder)

    assert [p.code for p in problems] == [ProblemCode.MISSING_WEIGHTS]
    assert "model.safetensors, a full model's" in problems[0].found


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS])
def test_c64_a_file_that_is_replaced_while_it_is_read_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    other = (folder / name).read_bytes()

    def read_while_a_trainer_writes(headers: Any, **arguments: Any) -> Any:
        (folder / "new").write_bytes(other)
        (folder / "new").replace(folder / name)
        return read_data(headers, **arguments)

    monkeypatch.setattr("lora_weights.checkpoint.read_data", read_while_a_trainer_writes)
    with pytest.raises(InvalidAdapterError, match="changed while it was read"):
        load_adapter(folder)
    monkeypatch.undo()

    assert set(load_adapter(folder).parts) == set(MODULES)


def test_c64_every_state_of_a_folder_that_grows_is_refused_until_it_is_whole(
    tmp_path: Path,
) -> None:
    whole = write_adapter(tmp_path / "whole", MODULES, r=4)
    config = (whole / "adapter_config.json").read_bytes()
    weights = (whole / WEIGHTS).read_bytes()
    growing = tmp_path / "growing"
    growing.mkdir()

    outcomes = []
    (growing / "adapter_config.json").write_bytes(config)
    outcomes.append(inspect_adapter(growing).is_loadable)
    for part in (0, 1, 8, 100, len(weights) // 2, len(weights) - 1):
        (growing / WEIGHTS).write_bytes(weights[:part])
        outcomes.append(inspect_adapter(growing).is_loadable)
    (growing / WEIGHTS).write_bytes(weights)

    assert outcomes == [False] * 7
    assert load_adapter(growing).digest == load_adapter(whole).digest


@pytest.mark.parametrize("name", ["model.q_proj.weight", "model.q_proj.base_layer.weight"])
def test_c64_a_file_of_base_tensors_only_is_refused(folder: Path, name: str) -> None:
    write_safetensors(folder / WEIGHTS, {name: torch.ones(4, 4)})

    assert [p.tensor for p in problems_of(folder)] == [name]


class Marker:
    """A pickle that leaves a file behind when it is loaded with full unpickling."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return (exec, (f"open({str(self.path)!r}, 'w').close()",))


@pytest.mark.parametrize("suffix", ["bin", "pt"])
@pytest.mark.parametrize("allow_pickle", [False, True])
def test_c49_code_in_a_pickle_never_runs(
    folder: Path, tmp_path: Path, suffix: str, allow_pickle: bool
) -> None:
    (folder / WEIGHTS).unlink()
    marker = tmp_path / "marker"
    torch.save({"a": Marker(marker)}, folder / f"adapter_model.{suffix}")

    report = inspect_adapter(folder, allow_pickle=allow_pickle)
    with pytest.raises((InvalidAdapterError, UnsafeFormatError)):
        load_adapter(folder, allow_pickle=allow_pickle)

    assert not report.is_loadable
    assert not marker.exists()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(folder / f"adapter_model.{suffix}", weights_only=True)  # noqa: TID251


def test_c49_safetensors_win_over_a_pickle_beside_them(folder: Path) -> None:
    digest = load_adapter(folder).digest
    torch.save({"a": torch.ones(2)}, folder / "adapter_model.bin")

    assert load_adapter(folder, allow_pickle=True).digest == digest


def test_c49_a_pickle_that_names_a_tensor_no_header_could_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({"a\n": torch.ones(2)}, folder / "adapter_model.bin")

    assert [p.code for p in problems_of(folder, allow_pickle=True)] == [
        ProblemCode.WEIGHTS_UNREADABLE
    ]


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float64, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    ],
)
def test_types_may_be_mixed_in_one_file(tmp_path: Path, dtypes: tuple[torch.dtype, ...]) -> None:
    raw = build_raw_adapter(MODULES, r=4, dtype=torch.bfloat16)
    mixed = {
        key: tensor.to(dtypes[i % len(dtypes)])
        for i, (key, tensor) in enumerate(sorted(raw.tensors.items()))
    }

    adapter = load_adapter(
        save_adapter(RawAdapter(config=raw.config, tensors=mixed), tmp_path), dtype=torch.float32
    )

    for path, part in adapter.parts.items():
        assert part.pair is not None
        # Values of bfloat16 are exact in all other types but float16, whose range is narrower.
        expected = mixed[f"base_model.model.{path}.lora_A.weight"].float()
        assert torch.equal(part.pair.lora_a, expected)
