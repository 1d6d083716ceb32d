"""Downloads of one source on disk: finished files by version, one unfinished each, one lock.

    <cache>/locks/<start of key>
    <cache>/<key>/<name>/<version>/<name>    finished; appears by a rename, never half
    <cache>/<key>/<name>/finished.json       of which version it is, and how long
    <cache>/<key>/<name>/partial             what an interrupted download left, to be continued
    <cache>/<key>/<name>/partial.json        of which version it is
    <cache>/<key>/scratch-...                of a call that is running, or was killed

Whoever holds the lock is alone with the source, in this process and in others.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from lora_weights.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

_KEY_DIGITS = 32
_LOCK_DIGITS = 3
_FINISHED = "finished.json"
_SCRATCH = "scratch-"


class SourceCache:
    """The downloads of one source. Use only while `locked`."""

    def __init__(self, root: Path, identity: str) -> None:
        """Name the folder; nothing is created yet.

        Args:
            root: the cache folder, shared by all sources.
            identity: what tells this source from others; hashed, so it may be anything.
        """
        key = _hash(identity)
        self.folder = root / key
        """Where this source's files are; not there when it has none."""
        # The locks have a folder of their own, as a lock that may be removed is none. Their number
        # is bounded; two sources that share one only wait for each other.
        self._lock = root / "locks" / key[:_LOCK_DIGITS]

    @contextmanager
    def locked(self, shown: str) -> Iterator[None]:
        """Hold the source alone; waits for whoever has it.

        Args:
            shown: the source, for the error.

        Raises:
            SourceError: this system has no file locks.
            OSError: the folder cannot be created.
        """
        try:
            import fcntl
        except ImportError as error:
            reason = "remote sources need a system with POSIX file locks; load from a folder"
            raise SourceError(source=shown, reason=reason) from error
        self._lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._lock.open("wb") as lock:
            # The lock goes with the open file, however this process ends.
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._sweep()
            try:
                yield
            finally:
                self._prune()

    def finished(self, name: str, version: str | None) -> Path | None:
        """Return the finished file of a version, if it is there and has its length still."""
        if version is None:
            return None
        path = self.folder / name / _hash(version) / name
        note = _read_note(self.folder / name / _FINISHED)
        is_there = path.is_file() and note == (version, path.stat().st_size)
        return path if is_there else None

    def known(self, name: str) -> str | None:
        """Return the version of the finished file, if there is one."""
        version, _ = _read_note(self.folder / name / _FINISHED)
        return None if self.finished(name, version) is None else version

    def partial(self, name: str) -> PartialFile:
        """Return the unfinished file of a name."""
        return PartialFile(self.folder / name)

    def finish(self, name: str, version: str | None) -> Path:
        """Make the unfinished file the finished one, and drop other versions of it.

        Args:
            name: the file.
            version: its version; None gives it a name that nothing finds again.
        """
        partial = self.partial(name)
        folder = self.folder / name / _hash(version or uuid.uuid4().hex)
        folder.mkdir(mode=0o700, exist_ok=True)
        note = self.folder / name / _FINISHED
        note.unlink(missing_ok=True)
        partial.path.replace(folder / name)
        if version is not None:
            size = (folder / name).stat().st_size
            note.write_text(json.dumps({"version": version, "bytes": size}))
        partial.drop()
        for other in (self.folder / name).iterdir():
            if other.is_dir() and other != folder:
                shutil.rmtree(other)
        return folder / name

    def drop(self, path: Path) -> None:
        """Remove a finished file."""
        path.parent.with_name(_FINISHED).unlink(missing_ok=True)
        shutil.rmtree(path.parent, ignore_errors=True)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a folder that is gone afterwards."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=_SCRATCH, dir=self.folder) as folder:
            yield Path(folder)

    def _sweep(self) -> None:
        """Remove scratch folders of processes that were killed; whoever is alone has none yet."""
        for folder in self.folder.glob(f"{_SCRATCH}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _prune(self) -> None:
        """Remove folders that hold nothing."""
        if not self.folder.is_dir():
            return
        for folder in (*self.folder.iterdir(), self.folder):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


class PartialFile:
    """What there is of a file whose download has not finished."""

    def __init__(self, folder: Path) -> None:
        """Look at what is there.

        Args:
            folder: the folder of this file's name.
        """
        self.path = folder / "partial"
        """The bytes so far."""
        self._note = folder / "partial.json"

    def state(self) -> tuple[int, str | None]:
        """Return how many bytes there are, and of which version; (0, None) without any."""
        version, _ = _read_note(self._note)
        if version is None or not self.path.is_file():
            return 0, None
        return self.path.stat().st_size, version

    @contextmanager
    def write(self, start: int, version: str | None) -> Iterator[BinaryIO]:
        """Open the file for appending.

        Args:
            start: bytes to keep.
            version: what the bytes belong to; without one they cannot be continued later.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not start:
            self.drop()
            if version is not None:
                self._note.write_text(json.dumps({"version": version}))
        with self.path.open("r+b" if start else "wb") as stream:
            stream.truncate(start)
            stream.seek(start)
            try:
                yield stream
            finally:
                # What a later call continues, or calls finished, has to be on the disk.
                stream.flush()
                os.fsync(stream.fileno())

    def drop(self) -> None:
        """Remove all of it."""
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)


def _read_note(note: Path) -> tuple[str | None, int | None]:
    """Return version and length in a note; None where there is none, or half of one."""
    try:
        content = json.loads(note.read_bytes())
        version, size = content["version"], content.get("bytes")
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None, None
    return (version, size) if isinstance(version, str) else (None, None)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_KEY_DIGITS]
