"""How large a request's body may be, and how long it may take to arrive.

Plain ASGI, so that a body is refused while it is read, chunked or not, and only once it is asked
for: a route that refuses the caller reads nothing. Knows nothing of routes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lora_server.errors import RequestError, RequestTimeoutError, RequestTooLargeError
from lora_server.http.errors import error_response

MIB: Final = 1024**2
_LINGER_S: Final = 2.0
"""How long the rest of a refused body is read and thrown away: a client that is still sending when
its connection is closed would lose the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """What is taken from a client before its request counts as sent."""

    max_bytes: int = 32 * MIB
    timeout_s: float = 60.0
    """From the first read to the last byte."""
    linger_s: float = _LINGER_S


class BodyLimitMiddleware:
    """Answers 413 and 408 in place of the application, which reads the body through it."""

    def __init__(self, app: ASGIApp, *, limits: BodyLimits) -> None:
        self.app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one exchange."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = _BoundedBody(scope, receive, self._limits)
        has_started = is_refused = False

        async def send_unless_refused(message: Message) -> None:
            # The framework turns whatever reading a body raises into a 400 of its own.
            nonlocal has_started, is_refused
            if message["type"] == "http.response.start":
                has_started, is_refused = True, body.failure is not None
                if body.failure is not None:
                    await _refuse(body.failure, receive, send, self._limits.linger_s)
            if not is_refused:
                await send(message)

        try:
            await self.app(scope, body.receive, send_unless_refused)
        except RequestError as error:
            if has_started or error is not body.failure:
                raise
            await _refuse(error, receive, send, self._limits.linger_s)


class _BoundedBody:
    """One request's messages, the body's counted and timed."""

    def __init__(self, scope: Scope, receive: Receive, limits: BodyLimits) -> None:
        self._receive = receive
        self._limits = limits
        self._declared = _declared_length(scope)
        self._num_bytes = 0
        self._deadline: float | None = None
        self._is_complete = False
        self.failure: RequestError | None = None
        """Why the body was refused."""

    async def receive(self) -> Message:
        """Return the next message; after the body they pass as they are."""
        if self._is_complete:
            return await self._receive()
        self._check_size(self._declared)
        message = await self._next()
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._check_size(self._num_bytes)
        self._is_complete = not message.get("more_body", False)
        return message

    async def _next(self) -> Message:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._limits.timeout_s
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._receive()
        except TimeoutError:
            self.failure = RequestTimeoutError(
                f"the body did not arrive within {self._limits.timeout_s:g} s"
            )
            raise self.failure from None

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_bytes:
            self.failure = RequestTooLargeError(
                f"the body has {num_bytes} bytes or more, expected at most {self._limits.max_bytes}"
            )
            raise self.failure


def _declared_length(scope: Scope) -> int:
    """Return what the request says of its body; the HTTP parser has checked that it is a number."""
    values = [value for name, value in scope["headers"] if name == b"content-length"]
    return int(values[0]) if values else 0


async def _refuse(error: RequestError, receive: Receive, send: Send, linger_s: float) -> None:
    """Answer, read on for a moment, and let the connection be closed."""
    response = error_response(error)
    head = {"status": response.status_code, "headers": response.raw_headers}
    await send({"type": "http.response.start", **head})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    try:
        async with asyncio.timeout(linger_s):
            while (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})
