"""Checkpoints in several files: read whole, or everything that does not fit is named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lora_weights import InvalidAdapterError, ProblemCode, inspect_adapter, load_adapter
from lora_weights.shards import is_plain_name, parse_index
from lora_weights.sources.folder import INDEX_FILE
from lora_weights.tensors import write_safetensors
from lora_weights.testing import build_raw_adapter, llama_modules, write_adapter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lora_weights import Problem

MODULES = llama_modules()
NAMES = [f"adapter_model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """An adapter whose tensors lie in three files, dealt out one after another."""
    raw = build_raw_adapter(MODULES)
    folder = write_adapter(tmp_path / "sharded", MODULES)
    (folder / "adapter_model.safetensors").unlink()
    keys = sorted(raw.tensors)
    for i, name in enumerate(NAMES):
        write_safetensors(folder / name, {key: raw.tensors[key] for key in keys[i::3]})
    table = {key: NAMES[i % 3] for i, key in enumerate(keys)}
    write_index(folder, {"metadata": {"total_size": 1}, "weight_map": table})
    return folder


def write_index(folder: Path, index: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps(index))


def read_index(folder: Path) -> dict[str, str]:
    table: dict[str, str] = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    return table


def problems_of(folder: Path) -> tuple[Problem, ...]:
    with pytest.raises(InvalidAdapterError) as caught:
        load_adapter(folder)
    return caught.value.problems


def test_several_files_give_the_adapter_of_one_file(sharded: Path, tmp_path: Path) -> None:
    one = load_adapter(write_adapter(tmp_path / "one", MODULES))

    several = load_adapter(sharded)

    assert several.digest == one.digest
    assert several.parts.keys() == one.parts.keys()


def test_the_headers_of_several_files_are_enough_for_a_report(sharded: Path) -> None:
    report = inspect_adapter(sharded, read_tensors=False)

    assert report.problems == ()
    assert report.num_tensors == 2 * len(MODULES)
    assert report.weights_bytes == load_adapter(sharded).nbytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_files_of_several_types_are_read_together(
    sharded: Path, dtype: torch.dtype, tmp_path: Path
) -> None:
    raw = build_raw_adapter(MODULES)
    table = read_index(sharded)
    changed = {
        key: tensor.to(dtype) if table[key] == NAMES[1] else tensor
        for key, tensor in raw.tensors.items()
    }
    write_safetensors(
        sharded / NAMES[1], {key: changed[key] for key, name in table.items() if name == NAMES[1]}
    )
    whole = write_adapter(tmp_path / "whole", MODULES)
    write_safetensors(whole / "adapter_model.safetensors", changed)

    assert load_adapter(sharded).digest == load_adapter(whole).digest


def test_c64_a_missing_file_is_named(sharded: Path) -> None:
    (sharded / NAMES[1]).unlink()

    problems = problems_of(sharded)

    assert [(p.code, p.tensor, p.found) for p in problems] == [
        (ProblemCode.SHARDED, INDEX_FILE, f"incomplete: {NAMES[1]} missing")
    ]
    assert problems[0].expected == "all of its 3 files"


def test_a_cut_file_and_a_missing_one_are_named_together(sharded: Path) -> None:
    (sharded / NAMES[0]).unlink()
    (sharded / NAMES[2]).write_bytes((sharded / NAMES[2]).read_bytes()[:-8])

    text = "\n".join(map(str, problems_of(sharded)))

    assert NAMES[0] in text
    assert f"{NAMES[2]} is" in text
    assert "cut off" in text


def test_a_key_of_the_index_without_a_tensor_is_named(sharded: Path) -> None:
    table = read_index(sharded)
    write_index(sharded, {"weight_map": {**table, "base_model.model.x.lora_A.weight": NAMES[0]}})

    problems = problems_of(sharded)

    assert [(p.tensor, p.found) for p in problems] == [
        ("base_model.model.x.lora_A.weight", "missing")
    ]


def test_a_tensor_without_an_entry_in_the_index_is_named(sharded: Path) -> None:
    table = read_index(sharded)
    left_out = sorted(table)[4]
    write_index(sharded, {"weight_map": {key: table[key] for key in table if key != left_out}})

    problems = problems_of(sharded)

    assert [(p.tensor, p.found) for p in problems] == [(left_out, f"in {table[left_out]}")]
    assert "an entry in" in problems[0].expected


def test_a_tensor_in_another_file_than_the_index_says_is_named(sharded: Path) -> None:
    table = read_index(sharded)
    key = min(table)
    write_index(sharded, {"weight_map": {**table, key: NAMES[2]}})

    assert {(p.tensor, p.found) for p in problems_of(sharded)} == {
        (key, f"in {NAMES[0]}"),
        (key, "missing"),
    }


def test_a_tensor_that_lies_in_two_files_is_named(sharded: Path) -> None:
    raw = build_raw_adapter(MODULES)
    table = read_index(sharded)
    mine = [key for key, name in table.items() if name == NAMES[0]]
    double = next(key for key, name in table.items() if name == NAMES[1])
    write_safetensors(sharded / NAMES[0], {key: raw.tensors[key] for key in [*mine, double]})

    assert [(p.tensor, p.found) for p in problems_of(sharded)] == [(double, f"in {NAMES[0]}")]


def test_files_without_an_index_are_refused_by_name(sharded: Path) -> None:
    (sharded / INDEX_FILE).unlink()

    problems = problems_of(sharded)

    assert [p.code for p in problems] == [ProblemCode.SHARDED]
    assert all(name in problems[0].found for name in NAMES)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: {"weight_map": dict.fromkeys(table, "../other/adapter_model.safetensors")},
        lambda table: {"weight_map": dict.fromkeys(table, "/etc/passwd")},
        lambda table: {"weight_map": dict.fromkeys(table, 7)},
        lambda table: {
            "weight_map": {k: f"{i}.safetensors" for i, k in enumerate(table)} | extra()
        },
        lambda _: {"weight_map": {}},
        lambda _: {"weight_map": []},
        lambda _: {"map": {}},
        lambda _: [],
    ],
    ids=["up", "absolute", "number", "too many", "empty", "list", "none", "no object"],
)
def test_an_index_that_is_none_is_refused(
    sharded: Path, change: Callable[[dict[str, str]], Any]
) -> None:
    write_index(sharded, change(read_index(sharded)))

    problems = problems_of(sharded)

    assert [(p.code, p.tensor) for p in problems] == [(ProblemCode.SHARDED, INDEX_FILE)]


def extra() -> dict[str, str]:
    return {f"k{i}": f"x{i}.safetensors" for i in range(1000)}


def test_an_index_that_names_a_key_twice_is_refused() -> None:
    _, problems = parse_index(b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')

    assert "'a' twice" in problems[0].found


@pytest.mark.parametrize(
    "name", ["a.safetensors", "adapter_model-1.safetensors", "x y.safetensors"]
)
def test_files_beside_the_index_are_plain_names(name: str) -> None:
    assert is_plain_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a.bin",
        ".a.safetensors",
        "a/b.safetensors",
        "c:b.safetensors",
        "a\\b.safetensors",
        "\n.safetensors",
        f"{'x' * 250}.safetensors",
        None,
    ],
)
def test_other_names_are_not(name: object) -> None:
    assert not is_plain_name(name)
