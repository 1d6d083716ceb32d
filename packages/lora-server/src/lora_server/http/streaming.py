"""Server-sent events, and work that ends when the client leaves. Knows no reply's shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from lora_server.http.errors import stream_error

_T = TypeVar("_T")

_BETWEEN_EVENTS: Final = "\n\ndata: "
_DONE: Final = b"data: [DONE]\n\n"
_CLIENT_CLOSED_REQUEST: Final = 499


def together(*events: str) -> str:
    """Join events that are known at the same time, so that they are sent in one piece."""
    return _BETWEEN_EVENTS.join(events)


class ClientGoneError(Exception):
    """The client closed the connection before its reply was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work` and cancel it as soon as the client leaves.

    Args:
        receive: the exchange's ASGI channel; the request's body must have been read.
        work: what the reply needs.

    Raises:
        ClientGoneError: the client left, and `work` has ended.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        # Waiting makes sure that the engine has been told before anybody goes on.
        await asyncio.gather(task, watcher, return_exceptions=True)


async def reply_while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Run `work`, whose result is the reply; nobody reads the reply to a client that left."""
    try:
        return await while_connected(request.receive, work)
    except ClientGoneError:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)


class EventStream(Response):
    """A reply of server-sent events; its head is sent before the first event exists.

    A failure after that is an event of its own, since the status is already sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], *, request_id: str) -> None:
        """Make the reply.

        Args:
            events: JSON texts, one an event or several `together`; closed when the client leaves.
            request_id: names the request in the log.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # The length is unknown; the base class has counted an empty body.
        del self.headers["content-length"]
        self._events = events
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, the events and the end, or stop when the client leaves."""
        del scope
        try:
            await while_connected(receive, self._send_all(send))
        except (ClientGoneError, OSError):
            return

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    body = f"data: {event}\n\n".encode()
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - the HTTP edge: logged and answered
                event = stream_error(error, self._request_id)
                body = f"data: {event}\n\n".encode()
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})


async def _disconnected(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
