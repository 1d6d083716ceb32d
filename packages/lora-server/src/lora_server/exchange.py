"""The HTTP exchange that the running code works for, as far as logs and traces need it.

A context variable is the one thing that follows a request through tasks and threads without being
handed on by everybody; it is set by the HTTP layer alone.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Where a request comes from."""

    request_id: str
    """Of the reply's `X-Request-Id`: the caller's own where it sent a usable one."""
    traceparent: str | None = None
    """The caller's span, as W3C Trace Context writes it."""
    tracestate: str | None = None


current_exchange: ContextVar[Exchange | None] = ContextVar("current_exchange", default=None)
"""None outside of requests: at start, in the engine's thread, between requests."""


def current_request_id() -> str | None:
    """Return the id of the request that is being served, if any."""
    exchange = current_exchange.get()
    return None if exchange is None else exchange.request_id
