"""The safetensors format: an 8-byte length, a JSON header, the data. Knows bytes, opens no file.

Written out here, and not taken from the library of that name, so that every fault of a file has
a name, and so that reading needs one copy and neither a memory map nor NumPy.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lora_weights.json_object import LFS_MARK, unique_keys

if TYPE_CHECKING:
    from collections.abc import Iterable

LENGTH_BYTES = 8
"""Bytes before the header: its length, little-endian."""

MAX_HEADER_BYTES = 100_000_000
"""Largest header accepted, the bound of the safetensors format."""

MAX_DIMENSIONS = 64
"""Most dimensions of a tensor, the bound of torch."""

_MAX_ELEMENTS = 2**60

_MAX_TEXT = 100

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Type names of the safetensors format that torch can hold."""

_WIDTHS = {name: dtype.itemsize for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: where it lies and what it is."""

    key: str
    """Key as the file spells it."""
    dtype: str
    """Type name of the safetensors format, such as F32."""
    shape: tuple[int, ...]
    """Shape as stored."""
    start: int
    """First byte, counted from the start of the data."""
    end: int
    """One past the last byte."""


def head_fault(head: bytes, size: int) -> tuple[str, str] | None:
    """Return (found, expected) when the first bytes rule out a safetensors file."""
    if size == 0:
        return "empty (0 bytes)", "a safetensors file"
    if LFS_MARK.startswith(head):
        return "a git-lfs pointer", "the file itself (run `git lfs pull`)"
    if len(head) < LENGTH_BYTES:
        return f"{size} bytes long", "a safetensors file of at least 8 bytes"
    length = struct.unpack("<Q", head)[0]
    if length > MAX_HEADER_BYTES:
        return f"not safetensors (its first 8 bytes are {head!r})", "a safetensors header"
    if length > size - LENGTH_BYTES:
        expected = f"at least {length + LENGTH_BYTES} for its header; it is cut off"
        return f"{size} bytes long", expected
    return None


def parse_header(
    header: bytes, size: int
) -> tuple[tuple[TensorEntry, ...], tuple[str, str] | None]:
    """Return the entries in data order, or (found, expected) for a header that is wrong."""
    expected = "the header of a safetensors file"
    try:
        items = json.loads(header, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        return (), (f"not safetensors ({error})", expected)
    if not isinstance(items, dict):
        return (), (f"not safetensors (its header is a {type(items).__name__})", expected)
    items.pop("__metadata__", None)
    entries = []
    for key, item in items.items():
        entry = _parse_entry(key, item)
        if isinstance(entry, str):
            return (), (f"not safetensors ({entry})", expected)
        entries.append(entry)
    entries.sort(key=lambda entry: (entry.start, entry.end))
    return tuple(entries), _layout_fault(entries, size)


def _parse_entry(key: str, item: object) -> TensorEntry | str:
    """Return the entry, or what is wrong with it."""
    entry = _read_entry(item)
    if entry is None:
        return f"{key[:100]!r} has no dtype, shape and data_offsets"
    dtype, shape, start, end = entry
    if not key.isprintable():
        return f"{key[:100]!r} is no name"
    width = _WIDTHS.get(dtype)
    if width is None:
        return f"{key!r} has the unknown type {dtype[:100]!r}"
    if _shape_fault(shape):
        return f"{key!r} has the shape {_short(shape)}"
    size = math.prod(shape) * width
    if start < 0 or end - start != size:
        found = f"{_short(end - start)} bytes at {_short(start)}"
        return f"{key!r} has {found}, its shape {_short(shape)} needs {_short(size)}"
    return TensorEntry(key, dtype, tuple(shape), start, end)


def _read_entry(item: object) -> tuple[str, list[int], int, int] | None:
    """Return dtype, shape, start and end of one entry; None when they are not all there."""
    if not isinstance(item, dict):
        return None
    dtype, shape, offsets = item.get("dtype"), item.get("shape"), item.get("data_offsets")
    if type(dtype) is not str or type(shape) is not list or type(offsets) is not list:
        return None
    if len(offsets) != 2 or any(type(offset) is not int for offset in offsets):  # noqa: PLR2004
        return None
    return dtype, shape, offsets[0], offsets[1]


def _shape_fault(shape: list[int]) -> bool:
    """Return whether no tensor can have this shape."""
    if len(shape) > MAX_DIMENSIONS:
        return True
    elements = 1
    for size in shape:
        if type(size) is not int or size < 0:
            return True
        # Beside a zero any number would pass the check of the bytes.
        elements *= size or 1
    return elements > _MAX_ELEMENTS


def _short(value: object) -> str:
    """Return a value's text, cut where a hostile file made it long."""
    try:
        text = str(value)
    except ValueError:  # a product with more digits than Python writes out
        return "a huge number"
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def _layout_fault(entries: list[TensorEntry], size: int) -> tuple[str, str] | None:
    """Return (found, expected) unless the tensors fill the data section one after another."""
    position = 0
    for entry in entries:
        if entry.start != position:
            found = f"inconsistent ({entry.key!r} starts at byte {_short(entry.start)})"
            return found, f"byte {position}"
        position = entry.end
    if position > size:
        return f"{size} bytes of data long", f"{_short(position)} as its header says; it is cut off"
    if position < size:
        return f"{size} bytes of data long", f"{position} as its header says"
    return None


def build_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """Return length and header for tensors that follow one after another.

    Args:
        tensors: (key, type name, shape, bytes), in the order of their data.
    """
    items: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for key, dtype, shape, size in tensors:
        items[key] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size
    header = json.dumps(items, separators=(",", ":")).encode()
    # Spaces up to a multiple of 8 keep the data aligned.
    header += b" " * (-len(header) % LENGTH_BYTES)
    return struct.pack("<Q", len(header)) + header
