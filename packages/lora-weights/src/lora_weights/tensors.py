"""Tensor files: safetensors read in one piece, pickle only by opt-in. Knows nothing of LoRA.

The file is read whole into memory of our own. A mapped file would change under a running server
when a trainer writes the folder again.
"""

from __future__ import annotations

import math
import pickle
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from lora_weights.errors import Problem, ProblemCode
from lora_weights.tensor_format import (
    DTYPES,
    LENGTH_BYTES,
    LFS_MARK,
    TensorEntry,
    build_header,
    head_fault,
    parse_header,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_TYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_UNPICKLING_FAULTS = (
    pickle.UnpicklingError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    EOFError,
    struct.error,
)
"""What torch's unpickler raises on bytes that are no checkpoint, or one with code in it."""


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
        head = stream.read(LENGTH_BYTES)
        size = before[0]
        fault = head_fault(head, size)
        if fault is not None:
            return None, [_unreadable(path, *fault)]
        length = struct.unpack("<Q", head)[0]
        header = stream.read(length)
        data = bytearray(size - LENGTH_BYTES - length)
        count = stream.readinto(data)
    if _stamp(path) != before or count != len(data):
        return None, [_unreadable(path, "changed while it was read", "a finished file")]
    entries, fault = parse_header(header, len(data))
    if fault is not None:
        return None, [_unreadable(path, *fault)]
    return TensorFile(entries=entries, data=data), []


def _stamp(path: Path) -> tuple[int, int, int]:
    """Return what changes when somebody writes or replaces the file."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


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
    if content.startswith(LFS_MARK):
        return None, [_unreadable(path, "a git-lfs pointer", "the file itself")]
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except _UNPICKLING_FAULTS as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        return None, [_unreadable(path, f"not readable ({reason})", "a state dict of tensors")]
    if not isinstance(loaded, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in loaded.items()
    ):
        return None, [_unreadable(path, "not a flat state dict", "names mapped to tensors")]
    header, data = _to_bytes(loaded)
    entries, fault = parse_header(header[LENGTH_BYTES:], len(data))
    if fault is not None:
        return None, [_unreadable(path, *fault)]
    return TensorFile(entries=entries, data=data), []


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file.

    Args:
        path: the file, replaced where it exists.
        tensors: key -> tensor, on any device; they may share memory.

    Raises:
        OSError: the file cannot be written.
        KeyError: the format has no name for a tensor's type.
    """
    header, data = _to_bytes(tensors)
    with path.open("wb") as stream:
        stream.write(header)
        stream.write(data)


def _to_bytes(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, bytearray]:
    """Return length and header, and the data."""
    # Wide types first, as the library does: every tensor then lies at a multiple of its width.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header = build_header(
        (key, _TYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
        for key, tensor in ordered
    )
    data = bytearray(sum(tensor.nbytes for _, tensor in ordered))
    position = 0
    for _, tensor in ordered:
        if tensor.nbytes:
            target = torch.frombuffer(
                data, dtype=tensor.dtype, count=tensor.numel(), offset=position
            )
            target.copy_(tensor.detach().reshape(-1))
        position += tensor.nbytes
    return header, data


def _unreadable(path: Path, found: str, expected: str) -> Problem:
    return Problem(
        code=ProblemCode.WEIGHTS_UNREADABLE, tensor=path.name, found=found, expected=expected
    )
