"""Tensor files: safetensors by header or whole, pickle only by opt-in. Knows nothing of LoRA.

Files are read whole into memory of our own. A mapped file would change under a running server
when a trainer writes the folder again.
"""

from __future__ import annotations

import math
import mmap
import pickle
import struct
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from lora_weights.errors import Problem, ProblemCode
from lora_weights.json_object import LFS_MARK
from lora_weights.selection import ALIGNMENT, Read, ReadPlan, cut_entries, plan_reads
from lora_weights.tensor_format import (
    DTYPES,
    LENGTH_BYTES,
    TensorEntry,
    build_header,
    head_fault,
    parse_header,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from io import FileIO
    from pathlib import Path

    from lora_weights.selection import Selector

_TYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

CHANGED = ("changed while it was read", "a finished file")
"""What is wrong (found, expected) with a file that somebody writes at the same time."""

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
    """The tensors of one checkpoint in memory, or only their names and shapes."""

    entries: tuple[TensorEntry, ...]
    """All tensors, in the order of their data."""
    data: bytearray | mmap.mmap = field(repr=False)
    """The data; the tensors are views of it. Empty when only headers were read."""
    has_numbers: bool = True
    """Whether the data was read."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, read or not."""
        return sum(entry.end - entry.start for entry in self.entries)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """What the front of one safetensors file says, checked against the file's size."""

    path: Path
    """The file."""
    entries: tuple[TensorEntry, ...]
    """Its tensors, in the order of their data; offsets count from the start of the data."""
    data_start: int
    """Where in the file the data begins."""
    data_bytes: int
    """Bytes of data."""
    stamp: FileStamp
    """State of the file when the header was read."""


def read_header(path: Path) -> tuple[FileHeader | None, list[Problem]]:
    """Read the front of a safetensors file, and not a byte of its data.

    Nothing is allocated from what the file claims: a header longer than the file is refused first.

    Args:
        path: the file.

    Returns:
        The header, or None with the reason it cannot be used: empty, truncated, a git-lfs
        pointer, not safetensors, tensors that overlap or leave gaps.

    Raises:
        OSError: the file cannot be opened or read.
    """
    with path.open("rb", buffering=0) as stream:
        stamp = file_stamp(path)
        head = stream.read(LENGTH_BYTES)
        fault = head_fault(head, stamp.size)
        if fault is not None:
            return None, [unreadable(path.name, *fault)]
        length = struct.unpack("<Q", head)[0]
        header = stream.read(length)
    data_start = LENGTH_BYTES + length
    data_bytes = stamp.size - data_start
    if len(header) != length:
        return None, [unreadable(path.name, *CHANGED)]
    entries, fault = parse_header(header, data_bytes)
    if fault is not None:
        return None, [unreadable(path.name, *fault)]
    found = FileHeader(
        path=path, entries=entries, data_start=data_start, data_bytes=data_bytes, stamp=stamp
    )
    return found, []


def read_data(
    headers: Sequence[FileHeader], *, select: Selector | None = None
) -> tuple[TensorFile | None, list[Problem]]:
    """Read the data of one file, or of all files of one checkpoint, into one piece of memory.

    Args:
        headers: the files, as `read_header` found them.
        select: what is wanted of each tensor; not a byte of the rest is read. None is everything.

    Returns:
        The tensors, or None with the files that changed since their header was read.

    Raises:
        OSError: a file cannot be opened or read.
    """
    plans = [_plan(header, select) for header in headers]
    places = list(_places([plan.size for plan in plans]))
    total = places[-1] + plans[-1].size if plans else 0
    data = _allocate(total)
    entries: list[TensorEntry] = []
    problems: list[Problem] = []
    for header, plan, place in zip(headers, plans, places, strict=True):
        target = memoryview(data)[place : place + plan.size]
        if not _read_plan(header, plan, target) or file_stamp(header.path) != header.stamp:
            problems.append(unreadable(header.path.name, *CHANGED))
        entries += _moved(plan.entries, place)
    if problems:
        return None, problems
    return TensorFile(entries=tuple(entries), data=data), []


def _allocate(size: int) -> bytearray | mmap.mmap:
    """Return writable memory.

    Pages of the system's own, where it has them: a bytearray is filled with zeros first, and a
    shared mapping, which is the default, costs half as much again as a private one.
    """
    if not size or sys.platform == "win32":
        return bytearray(size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _plan(header: FileHeader, select: Selector | None) -> ReadPlan:
    if select is not None:
        return plan_reads(header.entries, select)
    whole = Read(0, 0, header.data_bytes)
    return ReadPlan(entries=header.entries, reads=(whole,), size=header.data_bytes)


def _read_plan(header: FileHeader, plan: ReadPlan, target: memoryview) -> bool:
    """Fill `target` as planned; return whether the file had all of it."""
    with header.path.open("rb", buffering=0) as stream:
        for read in plan.reads:
            stream.seek(header.data_start + read.source)
            piece = target[read.target : read.target + read.size]
            if _read_into(stream, piece) != read.size:
                return False
    return True


def names_only(headers: Sequence[FileHeader]) -> TensorFile:
    """Return what the headers say as a checkpoint without numbers."""
    entries = [
        entry
        for header, place in zip(headers, _places([h.data_bytes for h in headers]), strict=True)
        for entry in _moved(header.entries, place)
    ]
    return TensorFile(entries=tuple(entries), data=bytearray(), has_numbers=False)


def _places(sizes: Sequence[int]) -> Iterator[int]:
    """Yield where each file's data goes; every file starts at a multiple of every type's width."""
    place = 0
    for size in sizes:
        yield place
        place += -(-size // ALIGNMENT) * ALIGNMENT


def _moved(entries: Sequence[TensorEntry], place: int) -> Sequence[TensorEntry]:
    if not place:
        return entries
    return [replace(entry, start=entry.start + place, end=entry.end + place) for entry in entries]


def _read_into(stream: FileIO, target: memoryview) -> int:
    """Fill `target`; return how many bytes there were."""
    count = 0
    while count < len(target):
        # One call of the system reads at most 2 GiB.
        step = stream.readinto(target[count:])
        if not step:
            break
        count += step
    return count


def read_safetensors(path: Path) -> tuple[TensorFile | None, list[Problem]]:
    """Read one safetensors file whole.

    Args:
        path: the file.

    Returns:
        The file, or None with the reason it cannot be read, as for `read_header`, or that it
        changed while it was read.

    Raises:
        OSError: the file cannot be opened or read.
    """
    header, problems = read_header(path)
    return (None, problems) if header is None else read_data([header])


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    """What changes when somebody writes or replaces a file."""

    size: int
    """Bytes."""
    changed_ns: int
    """Time of the last change, in nanoseconds."""
    node: int
    """Number of the file's node; a file moved in its place has another."""


def file_stamp(path: Path) -> FileStamp:
    """Return the state of a file.

    Raises:
        OSError: the file is not there.
    """
    status = path.stat()
    return FileStamp(size=status.st_size, changed_ns=status.st_mtime_ns, node=status.st_ino)


def read_pickle(
    path: Path, *, select: Selector | None = None
) -> tuple[TensorFile | None, list[Problem]]:
    """Read a ``.bin`` or ``.pt`` file with torch's restricted unpickler.

    Args:
        path: the file, from a source the caller trusts. It can be read only as a whole.
        select: what is wanted of each tensor; None is everything.

    Returns:
        The file as if it were safetensors, or None with the reason it cannot be read.

    Raises:
        OSError: the file cannot be opened or read.
    """
    content = path.read_bytes()
    if not content:
        return None, [unreadable(path.name, "empty (0 bytes)", "a torch file")]
    if content.startswith(LFS_MARK):
        return None, [unreadable(path.name, "a git-lfs pointer", "the file itself")]
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except _UNPICKLING_FAULTS as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        return None, [unreadable(path.name, f"not readable ({reason})", "a state dict of tensors")]
    if not isinstance(loaded, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in loaded.items()
    ):
        return None, [unreadable(path.name, "not a flat state dict", "names mapped to tensors")]
    header, data = _to_bytes(loaded)
    entries, fault = parse_header(header[LENGTH_BYTES:], len(data))
    if fault is not None:
        return None, [unreadable(path.name, *fault)]
    wanted = entries if select is None else cut_entries(entries, select)
    return TensorFile(entries=wanted, data=data), []


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


def unreadable(file_name: str, found: str, expected: str) -> Problem:
    """Return the problem of a weight file that cannot be read."""
    return Problem(
        code=ProblemCode.WEIGHTS_UNREADABLE, tensor=file_name, found=found, expected=expected
    )
