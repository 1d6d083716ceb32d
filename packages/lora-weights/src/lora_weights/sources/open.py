"""A source -> local files for as long as they are read."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from lora_weights.sources.address import parse_address
from lora_weights.sources.folder import find_files

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from lora_weights.sources.folder import AdapterFiles
    from lora_weights.sources.options import FetchOptions


class OpenedSource:
    """The files of a source, and whether what was downloaded for them may stay."""

    def __init__(self, files: AdapterFiles) -> None:
        self.files = files
        """Where the files lie."""
        self.is_kept = False
        """Whether `keep` was called."""

    def keep(self) -> None:
        """Say that the adapter is good: its downloads stay in the cache."""
        self.is_kept = True


@contextmanager
def open_source(
    source: str | os.PathLike[str],
    options: FetchOptions,
    *,
    allow_pickle: bool,
    read_tensors: bool,
) -> Iterator[OpenedSource]:
    """Make the files of a source readable on this machine.

    Args:
        source: as for `parse_address`.
        options: cache, bounds and credentials of remote sources.
        allow_pickle: fetch ``.bin`` and ``.pt`` files too.
        read_tensors: fetch the numbers too, and not only the headers.

    Yields:
        The files. They are there until the end of the block.

    Raises:
        AdapterNotFoundError: there is no adapter at the source.
        SourceError: it cannot be read.
        OSError: a folder of this machine cannot be listed.
    """
    address = parse_address(source)
    yield OpenedSource(find_files(address.location, shown=address.shown))
