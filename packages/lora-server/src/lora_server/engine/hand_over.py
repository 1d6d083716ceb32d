"""HandOver: wakes event loops from a thread of its own.

A thread that writes to another's descriptor wakes it on its own core, where the woken one may go
first: the engine's thread would begin its forward pass only when all streams were written. This
thread does not run before the pass has let go of the interpreter, on whatever core is free.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_log = logging.getLogger(__name__)


class HandOver:
    """Calls functions on event loops, in order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[
            tuple[asyncio.AbstractEventLoop, Callable[[], None]] | None
        ] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hand-over", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread once everything has been handed over."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def put(self, loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        """Let an event loop call a function soon."""
        self._queue.put((loop, function))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            loop, function = item
            try:
                loop.call_soon_threadsafe(function)
            except RuntimeError:
                _log.debug("an event loop closed before its outputs came")
