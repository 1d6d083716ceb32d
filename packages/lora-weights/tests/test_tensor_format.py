"""Headers of safetensors files: what is read, and the name of each fault."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_weights.tensor_format import build_header, head_fault, parse_header

if TYPE_CHECKING:
    from lora_weights.tensor_format import TensorEntry

GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def parse(items: object, size: int = 24) -> tuple[tuple[TensorEntry, ...], tuple[str, str] | None]:
    return parse_header(json.dumps(items).encode(), size)


def test_entries_come_in_the_order_of_their_data() -> None:
    later = {**GOOD, "data_offsets": [24, 48]}

    entries, fault = parse({"a": later, "b": GOOD, "__metadata__": {"format": "pt"}}, size=48)

    assert fault is None
    assert [entry.key for entry in entries] == ["b", "a"]


@pytest.mark.parametrize(
    ("items", "size", "found"),
    [
        ([1], 24, "a list"),
        ({"a": 1}, 24, "no dtype, shape and data_offsets"),
        ({"a": {**GOOD, "dtype": "F7"}}, 24, "unknown type 'F7'"),
        ({"a": {**GOOD, "shape": [2, -3]}}, 24, "shape [2, -3]"),
        ({"a": {**GOOD, "shape": [2, True]}}, 24, "shape [2, True]"),
        ({"a": {**GOOD, "shape": [2, 4]}}, 24, "needs 32"),
        ({"a": {**GOOD, "data_offsets": [-4, 20]}}, 24, "24 bytes at -4"),
        ({"a": {**GOOD, "data_offsets": [4, 28]}}, 28, "starts at byte 4"),
        ({"a": GOOD, "b": GOOD}, 48, "starts at byte 0"),
        ({"a": GOOD}, 23, "23 bytes of data"),
        ({"a": GOOD}, 25, "25 bytes of data"),
    ],
)
def test_each_fault_is_named(items: object, size: int, found: str) -> None:
    _, fault = parse(items, size)

    assert fault is not None
    assert found in fault[0]


def test_a_key_named_twice_is_a_fault() -> None:
    header = b'{"a": %s, "a": %s}' % (json.dumps(GOOD).encode(), json.dumps(GOOD).encode())

    _, fault = parse_header(header, 24)

    assert fault is not None
    assert "'a' twice" in fault[0]


@pytest.mark.parametrize(
    ("head", "size", "found"),
    [
        (b"", 0, "0 bytes"),
        (b"\x01\x00", 2, "2 bytes long"),
        (b"version ", 130, "git-lfs"),
        (struct.pack("<Q", 100), 50, "50 bytes long"),
        (b"PK\x03\x04abcd", 500, "not safetensors"),
    ],
)
def test_the_first_bytes_tell_what_is_no_safetensors_file(
    head: bytes, size: int, found: str
) -> None:
    fault = head_fault(head, size)

    assert fault is not None
    assert found in fault[0]


def test_a_built_header_parses_to_what_it_was_built_from() -> None:
    header = build_header([("a", "F32", (2, 3), 24), ("b", "BF16", (), 2)])

    entries, fault = parse_header(header[8:], 26)

    assert fault is None
    assert len(header) % 8 == 0
    assert [(e.key, e.dtype, e.shape, e.start, e.end) for e in entries] == [
        ("a", "F32", (2, 3), 0, 24),
        ("b", "BF16", (), 24, 26),
    ]


@given(st.binary(max_size=200), st.integers(0, 100))
def test_any_bytes_give_entries_or_a_fault(header: bytes, size: int) -> None:
    entries, fault = parse_header(header, size)

    assert fault is not None or sum(e.end - e.start for e in entries) == size
