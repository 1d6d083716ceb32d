"""What a remote storage offers: names, and files as streams that can begin in the middle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

CHUNK_BYTES = 2**18
"""Bytes asked for at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStream:
    """One file of a remote storage while it is read."""

    size: int | None
    """Bytes of the whole file as declared; None when the storage does not say."""
    version: str | None
    """Changes whenever the content does (an ETag, a generation); None when the storage has no such
    thing, or none that can be relied on."""
    start: int
    """Position in the file of the first byte of `chunks`."""
    chunks: Iterator[bytes]
    """The content from `start` on; hardly anything is transferred before it is iterated. A lost
    connection ends it early where `size` tells, and raises ConnectionError otherwise."""


class ChangedError(OSError):
    """A file was replaced while it was read, so that its parts do not belong together."""


class RemoteStore(Protocol):
    """A folder of a remote storage. Any error of the storage's own may come out of it."""

    def list_names(self) -> tuple[str, ...] | None:
        """Return the names in the folder, sorted; None when the storage cannot list.

        Sub-folders that hold an adapter are among them as ``folder/adapter_config.json``.
        """
        ...

    def open(
        self,
        name: str,
        *,
        start: int = 0,
        version: str | None = None,
        length: int | None = None,
        known: str | None = None,
    ) -> AbstractContextManager[RemoteStream]:
        """Open a file.

        Args:
            name: name in the folder.
            start: where to begin, when the file still has `version`; otherwise it begins at 0.
            version: the version of which the first `start` bytes are there already.
            length: how many bytes will be read; None is all. More may come.
            known: a version that is there whole; when it is still the current one, the stream has
                that version and need not have content.

        Raises:
            FileNotFoundError: there is no such file.
            ChangedError: the file changed while it was read; raised by iterating, too.
        """
        ...
