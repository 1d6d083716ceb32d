"""Tensor files: safetensors read in one piece, pickle only by opt-in. Knows nothing of LoRA.

The file is read whole into memory of our own. A mapped file would change under a running server
when a trainer writes the folder again.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import safetensors.torch
import torch

from lora_weights.errors import Problem, ProblemCode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_HEADER_BYTES = 100_000_000
"""Largest header accepted, the bound of the safetensors format."""

_LENGTH_BYTES = 8
_LFS_MARK = b"version https://git-lfs"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """A tensor file in memory."""

    entries: tuple[TensorEntry, ...]
    """All tensors, in the order of their data."""
    data: bytearray = field(repr=False)
    """The data section; the tensors are views of it."""

    def content(self, entry: TensorEntry) -> memoryview:
        """Return the bytes of one tensor."""
        return memoryview(self.data)[entry.start : entry.end]

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """Return one tensor as a view of the file's memory."""
        dtype = DTYPES[entry.dtype]
        if entry.start == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        count = math.prod(entry.shape)
        if entry.start % dtype.itemsize:
            raw = bytearray(self.content(entry))
            return torch.frombuffer(raw, dtype=dtype).view(entry.shape)
        flat = torch.frombuffer(self.data, dtype=dtype, count=count, offset=entry.start)
        return flat.view(entry.shape)

    def runs(self) -> Iterator[tuple[torch.Tensor, tuple[TensorEntry, ...]]]:
        """Yield each stretch of neighbouring tensors of one type as one flat tensor."""
        run: list[TensorEntry] = []
        for entry in self.entries:
            if run and (run[-1].dtype != entry.dtype or run[-1].end != entry.start):
                yield self._flat(run), tuple(run)
                run = []
            run.append(entry)
        if run:
            yield self._flat(run), tuple(run)

    def _flat(self, run: list[TensorEntry]) -> torch.Tensor:
        start, end = run[0].start, run[-1].end
        count = (end - start) // DTYPES[run[0].dtype].itemsize
        return self.tensor(TensorEntry("", run[0].dtype, (count,), start, end))


def read_safetensors(path: Path) -> tuple[TensorFile | None, list[Problem]]:
    """Read a safetensors file whole.

    Args:
        path: the file.

    Returns:
        The file, or None with the reason it cannot be read: empty, truncated, a git-lfs pointer,
        not safetensors, or changed while it was read.

    Raises:
        OSError: the file cannot be opened or read.
    """
    with path.open("rb") as stream:
        before = _stamp(path)
        head = stream.read(_LENGTH_BYTES)
        size = before[0]
        fault = _head_fault(head, size)
        if fault is not None:
            return None, [_unreadable(path, *fault)]
        length = struct.unpack("<Q", head)[0]
        header = stream.read(length)
        data = bytearray(size - _LENGTH_BYTES - length)
        count = stream.readinto(data)
    if _stamp(path) != before or count != len(data):
        return None, [_unreadable(path, "changed while it was read", "a finished file")]
    entries, fault = _parse_header(header, len(data))
    if fault is not None:
        return None, [_unreadable(path, *fault)]
    return TensorFile(entries=entries, data=data), []


def _stamp(path: Path) -> tuple[int, int, int]:
    """Return what changes when somebody writes or replaces the file."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _head_fault(head: bytes, size: int) -> tuple[str, str] | None:
    """Return (found, expected) when the first bytes rule out a safetensors file."""
    if size == 0:
        return "empty (0 bytes)", "a safetensors file"
    if _LFS_MARK.startswith(head):
        return "a git-lfs pointer", "the file itself (run `git lfs pull`)"
    if len(head) < _LENGTH_BYTES:
        return f"{size} bytes long", "a safetensors file of at least 8 bytes"
    length = struct.unpack("<Q", head)[0]
    if length > MAX_HEADER_BYTES:
        return f"not safetensors (its first 8 bytes are {head!r})", "a safetensors header"
    if length > size - _LENGTH_BYTES:
        expected = f"at least {length + _LENGTH_BYTES} for its header; it is cut off"
        return f"{size} bytes long", expected
    return None


def _parse_header(
    header: bytes, size: int
) -> tuple[tuple[TensorEntry, ...], tuple[str, str] | None]:
    """Return the entries in data order, or (found, expected) for a header that is wrong."""
    expected = "the header of a safetensors file"
    try:
        items = json.loads(header, object_pairs_hook=_unique_object)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
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


def _unique_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    items = dict(pairs)
    if len(items) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the header names {double!r} twice")
    return items


def _parse_entry(key: str, item: object) -> TensorEntry | str:
    """Return the entry, or what is wrong with it."""
    match item:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            pass
        case _:
            return f"{key!r} has no dtype, shape and data_offsets"
    if dtype not in DTYPES:
        return f"{key!r} has the unknown type {dtype!r}"
    if any(type(size) is not int or size < 0 for size in shape):
        return f"{key!r} has the shape {shape}"
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if start < 0 or end - start != size:
        return f"{key!r} has {end - start} bytes at {start}, its shape {shape} needs {size}"
    return TensorEntry(key, dtype, tuple(shape), start, end)


def _layout_fault(entries: list[TensorEntry], size: int) -> tuple[str, str] | None:
    """Return (found, expected) unless the tensors fill the data section one after another."""
    position = 0
    for entry in entries:
        if entry.start != position:
            return f"inconsistent ({entry.key!r} starts at byte {entry.start})", f"byte {position}"
        position = entry.end
    if position > size:
        return f"{size} bytes of data long", f"{position} as its header says; it is cut off"
    if position < size:
        return f"{size} bytes of data long", f"{position} as its header says"
    return None


def read_pickle(path: Path) -> tuple[TensorFile | None, list[Problem]]:
    """Read a ``.bin`` or ``.pt`` file with torch's restricted unpickler.

    Args:
        path: the file, from a source the caller trusts.

    Returns:
        The file as if it were safetensors, or None with the reason it cannot be read.

    Raises:
        OSError: the file cannot be opened or read.
    """
    content = path.read_bytes()
    if not content:
        return None, [_unreadable(path, "empty (0 bytes)", "a torch file")]
    if content.startswith(_LFS_MARK):
        return None, [_unreadable(path, "a git-lfs pointer", "the file itself")]
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except (RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        return None, [_unreadable(path, f"not readable ({reason})", "a state dict of tensors")]
    if not isinstance(loaded, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in loaded.items()
    ):
        return None, [_unreadable(path, "not a flat state dict", "names mapped to tensors")]
    content = safetensors.torch.save({key: value.contiguous() for key, value in loaded.items()})
    length = struct.unpack("<Q", content[:_LENGTH_BYTES])[0]
    data = bytearray(content[_LENGTH_BYTES + length :])
    entries, fault = _parse_header(content[_LENGTH_BYTES : _LENGTH_BYTES + length], len(data))
    if fault is not None:
        return None, [_unreadable(path, *fault)]
    return TensorFile(entries=entries, data=data), []


def _unreadable(path: Path, found: str, expected: str) -> Problem:
    return Problem(
        code=ProblemCode.WEIGHTS_UNREADABLE, tensor=path.name, found=found, expected=expected
    )
