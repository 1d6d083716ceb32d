"""The HTTP server's life: when it listens, and how it ends.

uvicorn raises a signal again after it has shut down, which would turn Ctrl-C into an exit status of
130 or a traceback; here a signal is an ordinary end. Knows nothing of what is served.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Protocol

import uvicorn

from lora_server.cli.connections import ConnectionConfig, ConnectionLimits
from lora_server.cli.drain import Drain, Drainable

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from types import FrameType

    from fastapi import FastAPI

_END_S = 5
"""Seconds for streams to send their end."""
_HURRIED_END_S = 1
"""The same when a second signal says that there is no time."""


class Endable(Drainable, Protocol):
    """The part of a service that the listener needs."""

    @property
    def app(self) -> FastAPI:
        """The application."""

    def begin_shutdown(self) -> None:
        """End all running requests, so that their streams end."""


class ServiceServer(uvicorn.Server):
    """Listens for one service until a signal.

    SIGTERM drains first; SIGINT, and a second signal, end the running requests at once. A SIGINT
    after that does not even wait for their last words.
    """

    def __init__(
        self, service: Endable, *, drain_timeout_s: float, limits: ConnectionLimits
    ) -> None:
        """Prepare to listen.

        Args:
            service: what is served.
            drain_timeout_s: how long running requests may go on after SIGTERM.
            limits: of each connection.
        """
        super().__init__(
            ConnectionConfig(
                service.app,
                limits=limits,
                log_config=None,
                ws="none",
                access_log=False,
                timeout_graceful_shutdown=_END_S,
            )
        )
        self._service = service
        self._drain = Drain(service, timeout_s=drain_timeout_s)
        self.on_listening: Callable[[], None] | None = None
        """Called on the server's thread as soon as connections are accepted."""
        self.on_hangup: Callable[[], None] | None = None
        """Called on SIGHUP, which ends the server where this is None."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end, or stop waiting; unlike uvicorn's, forgets the signal afterwards."""
        del frame
        if sig == signal.SIGTERM and not self._drain.is_begun and not self.should_exit:
            self._drain.begin()
            return
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        if self._drain.is_begun:
            self.config.timeout_graceful_shutdown = _HURRIED_END_S
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Say whether to end now; called ten times a second."""
        return await super().on_tick(counter) or self._drain.is_over()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then tell `on_listening`."""
        await super().startup(sockets)
        if self.on_hangup is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.on_hangup)
        if not self.should_exit and self.on_listening is not None:
            self.on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the running requests, then wait for their connections for a few seconds."""
        # on another thread: it may wait for the end of a step, and streams must flow meanwhile
        ending = asyncio.create_task(asyncio.to_thread(self._service.begin_shutdown))
        await super().shutdown(sockets)
        if self.force_exit:
            # left out by uvicorn then, and its task would end in a traceback
            await self.lifespan.shutdown()
        else:
            await ending
