"""One file of a remote store -> one file in the cache: bounded, continued, whole or not there."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from lora_weights.sources.store import ChangedError
from lora_weights.tensor_format import LENGTH_BYTES, head_fault

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import BinaryIO, Self

    from lora_weights.sources.cache import SourceCache
    from lora_weights.sources.store import RemoteStore

MAX_ATTEMPTS = 10
"""How often one file is begun or continued before its download counts as failed."""

FRONT_BYTES = 2**16
"""Bytes asked for first when only a header is wanted; most headers are shorter."""


class TooLargeError(OSError):
    """A source has more bytes than the caller allows."""


class Fetcher:
    """Downloads files of one source, within one bound for all of them.

    At the end of its block the finished downloads go, unless `keep` was called.
    """

    def __init__(self, store: RemoteStore, cache: SourceCache, *, max_bytes: int) -> None:
        """Start with nothing spent.

        Args:
            store: where the files are.
            cache: where they go; locked by the caller.
            max_bytes: most bytes of all files together.
        """
        self._store = store
        self._cache = cache
        self._max_bytes = max_bytes
        self._spent = 0
        self._fresh: list[Path] = []

    def fetch(self, name: str) -> Path:
        """Download a file, or find it in the cache in the version that the store has now.

        Returns:
            The file, whole. It may not be written.

        Raises:
            FileNotFoundError: the store has no such file.
            TooLargeError: it declares, or sends, more bytes than are left.
            ConnectionError: the connection was lost too often; what came is continued next time.
        """
        partial = self._cache.partial(name)
        try:
            for _ in range(MAX_ATTEMPTS):
                try:
                    path = self._attempt(name)
                except ChangedError:
                    partial.drop()
                    continue
                if path is not None:
                    self._spent += path.stat().st_size
                    return path
        finally:
            if partial.state()[1] is None:
                partial.drop()
        raise ConnectionError(f"{name}: lost the connection in {MAX_ATTEMPTS} attempts")

    def _attempt(self, name: str) -> Path | None:
        """Begin or continue a download; return the file when it is whole."""
        partial = self._cache.partial(name)
        have, version = partial.state()
        known = None if have else self._cache.known(name)
        with self._store.open(name, start=have, version=version, known=known) as stream:
            self._check_size(name, stream.size or 0)
            finished = self._cache.finished(name, stream.version)
            if finished is not None:
                partial.drop()
                return finished
            with partial.write(stream.start, stream.version) as target:
                try:
                    count = self._copy(name, stream.chunks, target, stream.start)
                except TooLargeError:
                    partial.drop()
                    raise
        if count is None or (stream.size is not None and count < stream.size):
            return None
        if stream.size is not None and count > stream.size:
            partial.drop()
            raise ConnectionError(f"{name}: {count} bytes sent, {stream.size} declared")
        path = self._cache.finish(name, stream.version)
        self._fresh.append(path)
        return path

    def _copy(self, name: str, chunks: Iterable[bytes], target: BinaryIO, count: int) -> int | None:
        """Write the chunks; return the file's size, or None when the connection was lost."""
        try:
            for chunk in chunks:
                count += len(chunk)
                self._check_size(name, count)
                target.write(chunk)
        except (ConnectionError, TimeoutError):
            return None
        return count

    def _check_size(self, name: str, size: int) -> None:
        if self._spent + size > self._max_bytes:
            found = f"{self._spent + size} bytes or more with {name}"
            raise TooLargeError(f"{found}, expected at most {self._max_bytes} (max_bytes)")

    def fetch_front(self, name: str, folder: Path) -> Path:
        """Download the header of a safetensors file only.

        Args:
            name: the file.
            folder: where the result goes.

        Returns:
            A file as long as the real one, with a hole where the data would be. When the front
            is no header, what is there of it.

        Raises:
            FileNotFoundError: the store has no such file.
            TooLargeError: it declares more bytes than are left.
            ConnectionError: the storage does not say how long the file is.
        """
        front, size = self._read_front(name, FRONT_BYTES)
        if head_fault(front[:LENGTH_BYTES], size) is None:
            end = LENGTH_BYTES + struct.unpack("<Q", front[:LENGTH_BYTES])[0]
            if end > len(front):
                front, size = self._read_front(name, end)
        path = folder / name
        with path.open("wb") as stream:
            stream.write(front)
            stream.truncate(size)
        return path

    def _read_front(self, name: str, count: int) -> tuple[bytes, int]:
        """Return the first bytes of a file, and its size."""
        front = bytearray()
        with self._store.open(name, length=count) as stream:
            if stream.size is None:
                raise ConnectionError(f"{name}: its size is not declared")
            self._check_size(name, stream.size)
            for chunk in stream.chunks:
                front += chunk
                if len(front) >= count:
                    break
        if len(front) < min(count, stream.size):
            raise ConnectionError(f"{name}: lost the connection after {len(front)} bytes")
        return bytes(front[:count]), stream.size

    def check_exists(self, name: str) -> None:
        """Return when the store has a file; nothing of it is kept.

        Raises:
            FileNotFoundError: it has none.
        """
        with self._store.open(name, length=1):
            pass

    def keep(self) -> None:
        """Let the finished downloads stay."""
        self._fresh.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove finished downloads that nobody said to keep; what was there before stays."""
        for path in self._fresh:
            self._cache.drop(path)
