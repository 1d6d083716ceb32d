"""What one connection may cost: the size of a request's head, and the time a client may take.

uvicorn bounds neither the head's size under httptools, nor the time that headers take, nor how long
a client may leave an answer unread. Answers given here are those of requests that never reach the
application.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    import asyncio

_MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_HEADERS: Final = 100
_STATUS_LINES: Final = {
    400: b"HTTP/1.1 400 Bad Request\r\n",
    431: b"HTTP/1.1 431 Request Header Fields Too Large\r\n",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of one connection."""

    header_timeout_s: float = 30.0
    """From the connection, or the end of its idle time, to the end of a request's headers."""
    write_timeout_s: float = 60.0
    """How long a client may leave what it is sent unread, once buffers are full."""
    keep_alive_s: int = 30
    """How long a connection stays open without a request."""
    max_head_bytes: int = _MAX_HEAD_BYTES
    """Request line and headers together."""
    max_headers: int = _MAX_HEADERS


class ConnectionConfig(uvicorn.Config):
    """uvicorn's configuration, with limits that `BoundedConnection` reads."""

    def __init__(self, app: Any, *, limits: ConnectionLimits, **options: Any) -> None:
        """Serve `app` over `BoundedConnection`; `options` are uvicorn's."""
        super().__init__(
            app, http=BoundedConnection, timeout_keep_alive=limits.keep_alive_s, **options
        )
        self.limits = limits


class _HeadTooLargeError(Exception):
    """Stops the parser; the answer is sent by whoever fed it."""


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection with bounds on heads, and on clients that send or read nothing."""

    def __init__(self, config: uvicorn.Config, *arguments: Any, **options: Any) -> None:
        assert isinstance(config, ConnectionConfig)
        super().__init__(config, *arguments, **options)
        self._limits = config.limits
        self._is_in_head = True
        self._num_head_bytes = 0
        self._fault: str | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, and wait for headers."""
        super().connection_made(transport)
        self._head_timer = self._later(self._limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        _cancel(self._head_timer)
        _cancel(self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; a head that goes on and on is refused before it is whole."""
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self._limits.max_head_bytes:
                self._fault = f"has more than {self._limits.max_head_bytes} bytes"
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """Begin a request's head."""
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Start the request, unless its head is larger than it may be."""
        _cancel(self._head_timer)
        self._is_in_head = False
        most_bytes, most = self._limits.max_head_bytes, self._limits.max_headers
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > most_bytes:
            self._fault = f"has {num_bytes} bytes, expected at most {most_bytes}"
        elif len(self.headers) > most:
            self._fault = f"has {len(self.headers)} headers, expected at most {most}"
        if self._fault is not None:
            raise _HeadTooLargeError
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        _cancel(self._head_timer)
        self._head_timer = self._later(self._limits.keep_alive_s + self._limits.header_timeout_s)

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on sending."""
        _cancel(self._write_timer)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser could not read, or would not read on, and close."""
        if self.transport.is_closing():
            return
        status, text, code = 400, msg, "invalid_request"
        if self._fault is not None:
            status, code = 431, "headers_too_large"
            text = f"the head of the request {self._fault}"
        body = _error_json(text, code)
        head = _STATUS_LINES[status] + (
            b"content-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )
        self.transport.write(head + body)
        self.transport.close()

    def _later(self, seconds: float) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, self._close_unless_busy)

    def _close_unless_busy(self) -> None:
        """Close a connection on which no request is being served."""
        # There is no cycle before the first request, whatever uvicorn's annotation says.
        if getattr(self.cycle, "response_complete", True):
            self.transport.close()


def _error_json(message: str, code: str) -> bytes:
    """Return an error in the OpenAI API's shape."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return json.dumps({"error": error}).encode()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
