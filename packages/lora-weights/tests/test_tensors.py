"""Tensor files: bit-equal with the safetensors library, and a problem for each broken file."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
import torch

from lora_weights.tensors import read_pickle, read_safetensors, write_safetensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    table = {
        f"t{i}": torch.randn((3, 5), generator=generator).to(dtype)
        for i, dtype in enumerate(DTYPES)
    }
    return {**table, "scalar": torch.tensor(2.5), "empty": torch.zeros((0, 4))}


def read(path: Path) -> dict[str, torch.Tensor]:
    file, problems = read_safetensors(path)
    assert problems == []
    assert file is not None
    return {entry.key: file.tensor(entry) for entry in file.entries}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor)


def test_what_is_written_reads_back_bit_equal(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", tensors())

    assert_equal(read(tmp_path / "x.safetensors"), tensors())


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors")
    write_safetensors(tmp_path / "x.safetensors", tensors())

    with library.safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    assert_equal(found, tensors())


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    library.save_file(tensors(), tmp_path / "x.safetensors")

    assert_equal(read(tmp_path / "x.safetensors"), tensors())


def test_tensors_that_share_memory_are_written_each(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(4, 3)

    write_safetensors(tmp_path / "x.safetensors", {"whole": whole, "t": whole.T, "row": whole[1:2]})

    assert_equal(
        read(tmp_path / "x.safetensors"), {"whole": whole, "t": whole.T, "row": whole[1:2]}
    )


def test_a_tensor_read_does_not_change_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": torch.ones(4)})
    found = read(path)

    with path.open("r+b") as stream:
        stream.seek(-16, 2)
        stream.write(b"\xff" * 16)

    assert torch.equal(found["a"], torch.ones(4))


def test_neighbours_of_one_type_form_one_run(tmp_path: Path) -> None:
    write_safetensors(
        tmp_path / "x.safetensors",
        {"a": torch.ones(2), "b": torch.zeros(3), "c": torch.ones(2).half()},
    )
    file, _ = read_safetensors(tmp_path / "x.safetensors")
    assert file is not None

    runs = [(flat.tolist(), [entry.key for entry in entries]) for flat, entries in file.runs()]

    assert runs == [([1, 1, 0, 0, 0], ["a", "b"]), ([1, 1], ["c"])]


@pytest.mark.parametrize("keep", [0, 4, 8, 60, -1])
def test_a_file_that_is_cut_off_is_a_problem_that_names_it(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "adapter_model.safetensors"
    write_safetensors(path, {"a": torch.ones(4)})
    path.write_bytes(path.read_bytes()[:keep])

    file, problems = read_safetensors(path)

    assert file is None
    assert problems[0].code == "weights_unreadable"
    assert problems[0].tensor == "adapter_model.safetensors"


def test_pickle_reads_as_the_same_tensors(tmp_path: Path) -> None:
    table = {key: tensor for key, tensor in tensors().items() if key != "empty"}
    torch.save(table, tmp_path / "x.bin")

    file, problems = read_pickle(tmp_path / "x.bin")

    assert problems == []
    assert file is not None
    assert_equal({entry.key: file.tensor(entry) for entry in file.entries}, table)


class Evil:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return (exec, ("raise SystemExit('code from a pickle ran')",))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1",
        b"not a pickle",
        pickle.dumps({"a": Evil()}, protocol=2),
        pickle.dumps([1, 2], protocol=2),
    ],
    ids=["empty", "lfs", "noise", "code", "list"],
)
def test_a_pickle_that_holds_no_plain_tensors_is_a_problem(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(content)

    file, problems = read_pickle(path)

    assert file is None
    assert problems[0].code == "weights_unreadable"


def test_a_nested_state_dict_is_a_problem(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(2)}}, tmp_path / "x.bin")

    _, problems = read_pickle(tmp_path / "x.bin")

    assert "flat state dict" in problems[0].found
