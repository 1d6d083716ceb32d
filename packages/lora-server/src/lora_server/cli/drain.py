"""The time between the wish to end and the end: running requests finish, new ones are refused.

Knows nothing of signals and sockets.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

from lora_server.logs import log_fields

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)


class Drainable(Protocol):
    """The part of a service that is drained."""

    @property
    def num_running(self) -> int:
        """Requests that were taken and whose replies are not complete."""

    def begin_drain(self) -> None:
        """Take no more requests, and say so to whoever asks. May be called in a signal handler."""


class Drain:
    """One drain of one service. All on the event loop's thread."""

    def __init__(
        self,
        service: Drainable,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; nothing happens before `begin`.

        Args:
            service: what is drained.
            timeout_s: how long running requests may go on.
            clock: seconds.
        """
        self._service = service
        self._timeout_s = timeout_s
        self._clock = clock
        self._end_s: float | None = None
        self._is_told = False

    @property
    def is_begun(self) -> bool:
        """Whether `begin` was called."""
        return self._end_s is not None

    def begin(self) -> None:
        """Refuse new requests from now on. Logs nothing: a signal may have come amid a line."""
        self._end_s = self._clock() + self._timeout_s
        self._service.begin_drain()

    def is_over(self) -> bool:
        """Whether nothing runs any more, or the time is over; False before it has begun."""
        if self._end_s is None:
            return False
        num_running = self._service.num_running
        if not self._is_told:
            self._is_told = True
            _log.info(
                "Draining: running requests may finish, new ones are refused",
                extra=log_fields(running=num_running, seconds=self._timeout_s),
            )
        if num_running == 0:
            _log.info("Drained")
            return True
        if self._clock() < self._end_s:
            return False
        _log.warning(
            "The time to drain is over: requests that still run are ended",
            extra=log_fields(running=num_running),
        )
        return True
