"""What is known of one HTTP exchange, and the headers that every reply carries.

The middleware is plain ASGI: it costs one call a message and leaves streams as they are.
"""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lora_server.exchange import Exchange, current_exchange
from lora_server.http.audit import AuditRecord
from lora_server.http.errors import error_response, log_failure
from lora_server.http.keys import Caller
from lora_server.logs import log_fields

_log = logging.getLogger(__name__)

_MAX_REQUEST_ID_LEN: Final = 128
_READING: Final = frozenset({"GET", "HEAD"})
"""Methods of probes, scrapes and the page's polling: one line for each would bury the others."""


@dataclass(slots=True, kw_only=True)
class ExchangeContext:
    """One request and its reply."""

    request_id: str
    """The client's own id where it sent a usable one."""
    adapter_label: str | None = None
    """What answers, for the header; None until the adapter is chosen."""
    caller: Caller | None = None
    """Who asks; None until the key is checked."""
    audit: AuditRecord | None = None
    """What is recorded of a management call."""
    held: ExitStack = field(default_factory=ExitStack)
    """What is kept until the reply is complete, or the client has left."""


def context_of(request: Request) -> ExchangeContext:
    """Return the context that the middleware has put beside the request."""
    context: ExchangeContext = request.state.context
    return context


class ContextMiddleware:
    """Gives each exchange its context, and a last answer when something unexpected is raised.

    Each exchange is one log line, without its query and body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one exchange."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _exchange(scope)
        context = ExchangeContext(request_id=exchange.request_id)
        scope.setdefault("state", {})["context"] = context
        token = current_exchange.set(exchange)
        start_s = time.perf_counter()
        try:
            status = await self._serve(context, scope, receive, send)
            _log_exchange(scope, context, status, time.perf_counter() - start_s)
        finally:
            current_exchange.reset(token)

    async def _serve(
        self, context: ExchangeContext, scope: Scope, receive: Receive, send: Send
    ) -> int | None:
        """Run the application; return the status that was sent, None where there was none."""
        status: int | None = None

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_headers(context)]
            await send(message)

        try:
            with context.held:
                await self.app(scope, receive, send_with_headers)
        except Exception as error:
            if status is not None:
                raise
            log_failure(error, context.request_id)
            await error_response(error)(scope, receive, send_with_headers)
        return status


def _log_exchange(
    scope: Scope, context: ExchangeContext, status: int | None, seconds: float
) -> None:
    level = logging.DEBUG if scope["method"] in _READING else logging.INFO
    if not _log.isEnabledFor(level):
        return
    # the undecoded form has no characters that could end the line
    path = scope.get("raw_path") or scope["path"].encode()
    _log.log(
        level,
        "Request done",
        extra=log_fields(
            method=scope["method"],
            path=path.decode("latin-1").partition("?")[0],
            status=status,
            adapter=context.adapter_label,
            ms=seconds * 1000,
        ),
    )


def _headers(context: ExchangeContext) -> list[tuple[bytes, bytes]]:
    headers = [(b"x-request-id", context.request_id.encode())]
    if context.adapter_label is not None:
        headers.append((b"x-lora-adapter", context.adapter_label.encode()))
    if context.caller is not None and context.caller.limits is not None:
        limits = context.caller.limits.headers()
        headers += [(name.encode(), value.encode()) for name, value in limits]
    return headers


def _exchange(scope: Scope) -> Exchange:
    """Read the headers that say where a request comes from."""
    request_id = traceparent = tracestate = None
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            request_id = request_id or _usable_id(value)
        elif name == b"traceparent":
            traceparent = value.decode("latin-1")
        elif name == b"tracestate":
            tracestate = value.decode("latin-1")
    return Exchange(
        request_id=request_id or uuid.uuid4().hex, traceparent=traceparent, tracestate=tracestate
    )


def _usable_id(value: bytes) -> str | None:
    """Return the client's id when it is short and printable."""
    if not 0 < len(value) <= _MAX_REQUEST_ID_LEN:
        return None
    text = value.decode("latin-1")
    return text if text.isascii() and text.isprintable() else None
