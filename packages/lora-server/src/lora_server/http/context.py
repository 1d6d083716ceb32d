"""What is known of one HTTP exchange, and the headers that every reply carries.

The middleware is plain ASGI: it costs one call a message and leaves streams as they are.
"""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lora_server.http.audit import AuditRecord
from lora_server.http.errors import error_response, log_failure
from lora_server.http.keys import Caller

_MAX_REQUEST_ID_LEN: Final = 128


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
    """Gives each exchange its context, and a last answer when something unexpected is raised."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one exchange."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context = ExchangeContext(request_id=_request_id(scope))
        scope.setdefault("state", {})["context"] = context
        has_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [*message.get("headers", ()), *_headers(context)]
            await send(message)

        try:
            with context.held:
                await self.app(scope, receive, send_with_headers)
        except Exception as error:
            if has_started:
                raise
            log_failure(error, context.request_id)
            await error_response(error)(scope, receive, send_with_headers)


def _headers(context: ExchangeContext) -> list[tuple[bytes, bytes]]:
    headers = [(b"x-request-id", context.request_id.encode())]
    if context.adapter_label is not None:
        headers.append((b"x-lora-adapter", context.adapter_label.encode()))
    if context.caller is not None and context.caller.limits is not None:
        limits = context.caller.limits.headers()
        headers += [(name.encode(), value.encode()) for name, value in limits]
    return headers


def _request_id(scope: Scope) -> str:
    """Take the client's id when it is short and printable, or make one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and 0 < len(value) <= _MAX_REQUEST_ID_LEN:
            text = value.decode("latin-1")
            if text.isascii() and text.isprintable():
                return str(text)
    return uuid.uuid4().hex
