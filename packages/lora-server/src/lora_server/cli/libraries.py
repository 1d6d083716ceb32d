"""How a command loads its libraries: the collector waits, and the disk is busy meanwhile.

Importing torch and transformers keeps one core busy for seconds and is most of a server's start.
Knows nothing of what is imported.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger(__name__)

_PIECE_BYTES = 4 * 2**20


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Hold Python's garbage collector back while the block imports.

    Nearly a million objects are made and stay, and the collector would walk over the growing heap
    again and again: a fifth of the time. They are left out of later collections too, of which a
    full one would stop all streams for half a second. `release_libraries` takes that back.
    """
    started = time.perf_counter()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
    _log.info("libraries loaded in %.1f s", time.perf_counter() - started)


def release_libraries() -> None:
    """Let the collector see all objects again, so that the process ends in the usual order."""
    gc.unfreeze()


def read_ahead(model: str) -> threading.Thread:
    """Have the system read a model's weights into its file cache, beside what else is done.

    Whatever is wrong with the files, loading the model says so.

    Args:
        model: a folder; names in the hub cache are left alone. So are files that would take more
            than half of the memory that is free: loading would have to read them again.

    Returns:
        The thread that reads.
    """
    from lora_server.machine import host_available_bytes

    files = sorted(Path(model).expanduser().glob("*.safetensors"))
    if sum(file.stat().st_size for file in files) > host_available_bytes() // 2:
        files = []
    # a daemon: a start that fails does not wait for the disk
    thread = threading.Thread(target=_read_all, args=(files,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _read_all(files: list[Path]) -> None:
    """Read and forget; asking with `posix_fadvise` is heard for the first pages of a file only."""
    piece = bytearray(_PIECE_BYTES)
    for file in files:
        try:
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(piece):
                    pass
        except OSError as error:
            _log.debug("%s is not read ahead: %s", file, error)
