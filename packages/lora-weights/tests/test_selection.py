"""Reading some tensors of a file: the right values, and not a byte more than was wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_weights.selection import plan_reads
from lora_weights.tensor_format import TensorEntry
from lora_weights.tensors import read_data, read_header, write_safetensors
from lora_weights.testing import count_reads

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def test_unwanted_tensors_and_rows_are_not_read(tmp_path: Path) -> None:
    tensors = {name: torch.arange(24.0).reshape(6, 4) + ord(name) for name in "abcd"}
    path = tmp_path / "file.safetensors"
    write_safetensors(path, tensors)
    header, _ = read_header(path)
    assert header is not None
    wanted = {"a": range(0), "b": range(2, 4), "c": None, "d": range(0)}

    with count_reads() as touched:
        file, problems = read_data([header], select=lambda entry: wanted[entry.key])

    assert problems == []
    assert file is not None
    assert {entry.key: entry.shape for entry in file.entries} == {"b": (2, 4), "c": (6, 4)}
    found = {entry.key: file.tensor(entry) for entry in file.entries}
    assert torch.equal(found["b"], tensors["b"][2:4])
    assert torch.equal(found["c"], tensors["c"])
    places = {entry.key: header.data_start + entry.start for entry in header.entries}
    row = 4 * 4
    rows_of_b = range(places["b"] + 2 * row, places["b"] + 4 * row)
    assert touched == {*rows_of_b, *range(places["c"], places["c"] + 6 * row)}


def test_all_files_of_a_checkpoint_are_read_selectively(tmp_path: Path) -> None:
    headers = []
    for name in "ab":
        path = tmp_path / f"{name}.safetensors"
        write_safetensors(path, {f"{name}{i}": torch.full((3,), float(i)) for i in range(3)})
        header, _ = read_header(path)
        assert header is not None
        headers.append(header)

    file, _ = read_data(headers, select=lambda entry: None if entry.key[1] == "2" else range(0))

    assert file is not None
    assert {entry.key: file.tensor(entry).tolist() for entry in file.entries} == {
        "a2": [2.0, 2.0, 2.0],
        "b2": [2.0, 2.0, 2.0],
    }


def test_nothing_wanted_is_nothing_read(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write_safetensors(path, {"a": torch.ones(3)})
    header, _ = read_header(path)
    assert header is not None

    with count_reads() as touched:
        file, problems = read_data([header], select=lambda _: range(0))

    assert (problems, touched) == ([], set())
    assert file is not None
    assert file.entries == ()


def test_a_file_that_was_cut_meanwhile_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write_safetensors(path, {"a": torch.ones(3), "b": torch.ones(3)})
    header, _ = read_header(path)
    assert header is not None
    path.write_bytes(path.read_bytes()[:-8])

    file, problems = read_data([header], select=lambda _: None)

    assert file is None
    assert "changed while it was read" in str(problems[0])


@given(
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    cuts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=8, max_size=8),
    kinds=st.lists(st.sampled_from(["F32", "F16", "F64"]), min_size=8, max_size=8),
)
@settings(max_examples=80)
def test_a_plan_reads_exactly_what_is_wanted_once(
    rows: Sequence[int], cuts: Sequence[tuple[int, int]], kinds: Sequence[str]
) -> None:
    widths = {"F32": 12, "F16": 6, "F64": 24}
    entries, start = [], 0
    wanted: dict[str, range] = {}
    for index, (count, kind, cut) in enumerate(zip(rows, kinds, cuts, strict=False)):
        end = start + count * widths[kind]
        entries.append(TensorEntry(str(index), kind, (count, 3), start, end))
        low, high = sorted(min(place, count) for place in cut)
        wanted[str(index)] = range(low, high)
        start = end

    plan = plan_reads(entries, lambda entry: wanted[entry.key])

    moved = {
        read.target + offset: read.source + offset
        for read in plan.reads
        for offset in range(read.size)
    }
    places = {entry.key: entry for entry in entries}
    for entry in plan.entries:
        width = widths[entry.dtype]
        source = places[entry.key].start + wanted[entry.key].start * width
        assert entry.shape == (len(wanted[entry.key]), 3)
        assert [moved[place] for place in range(entry.start, entry.end)] == list(
            range(source, source + len(wanted[entry.key]) * width)
        )
    total = sum(len(wanted[entry.key]) * widths[entry.dtype] for entry in entries)
    assert len(moved) == total == sum(read.size for read in plan.reads)
    assert plan.size == max(moved, default=-1) + 1
