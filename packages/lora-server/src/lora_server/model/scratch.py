"""Folders in which something large is written before it gets its name.

Each is locked by the process that writes into it. The lock goes with the process, however it ends,
and what it leaves behind is removed by the next one. Knows nothing of what is written.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFIX = "partial-"
_ABANDONED_S = 24 * 3600
"""Where folders cannot be locked, one that nobody has written to for so long is nobody's."""


@contextmanager
def scratch_folder(cache: Path, parent: Path) -> Iterator[Path]:
    """Yield a new folder in `parent` that is removed afterwards, also those of dead processes.

    Args:
        cache: the folder of all parents, shared by all processes; created where it is not there.
        parent: a folder in `cache`; created where it is not there.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        # Between its making and its locking a folder looks abandoned: nobody may look then.
        with ExitStack() as looking:
            _lock(cache, looking, waits=True)
            _remove_unheld(cache)
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            _lock(folder, held, waits=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(cache: Path) -> None:
    """Remove what processes that were killed have left in the folders of `cache`."""
    if not any(cache.glob(f"*/{_PREFIX}*")):
        return
    with ExitStack() as looking:
        _lock(cache, looking, waits=True)
        _remove_unheld(cache)


def _remove_unheld(cache: Path) -> None:
    for folder in cache.glob(f"*/{_PREFIX}*"):
        with ExitStack() as held:
            if _lock(folder, held, waits=False):
                shutil.rmtree(folder, ignore_errors=True)


if sys.platform == "win32":

    def _lock(folder: Path, held: ExitStack, *, waits: bool) -> bool:
        """Folders cannot be locked here; say whether one is old enough to be nobody's."""
        del held
        if waits:
            return True
        try:
            return time.time() - folder.stat().st_mtime > _ABANDONED_S
        except OSError:
            return False

else:
    import fcntl

    def _lock(folder: Path, held: ExitStack, *, waits: bool) -> bool:
        """Lock a folder until `held` is closed; say whether that succeeded.

        Args:
            folder: what is locked.
            held: closes what holds the lock.
            waits: wait for whoever has the lock; otherwise give up at once.
        """
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        held.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except OSError:
            # Somebody has it, or this file system has no locks: then the folder stays.
            return False
        return True
