"""Routes that check the caller's key. Each route declares its level through its class.

The key is checked before a body is read. Knows nothing of what the routes do.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from fastapi import Request, Response
from fastapi.routing import APIRoute

from lora_server.http.audit import AuditRecord, begin_record, written
from lora_server.http.context import context_of
from lora_server.http.describe import Responses, error_responses, security_of
from lora_server.http.keys import Access, ApiKeys

__all__ = [
    "Access",
    "AdminRoute",
    "ApiKeys",
    "GuardedRoute",
    "OpenRoute",
    "OverviewRoute",
    "UserRoute",
    "audit_of",
]


class GuardedRoute(APIRoute):
    """A route that checks the key first. Use a subclass that names the level."""

    access: ClassVar[Access] = Access.ADMIN

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        methods: set[str] | list[str] | None = None,
        responses: Responses | None = None,
        openapi_extra: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Describe the route's errors and keys; the arguments are FastAPI's."""
        super().__init__(
            path,
            endpoint,
            methods=methods,
            responses={**error_responses(self.access, set(methods or ())), **(responses or {})},
            openapi_extra={**security_of(self.access), **(openapi_extra or {})},
            **options,
        )

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler, so that nothing is read from a caller without a key."""
        handler = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            keys: ApiKeys = request.app.state.service.keys
            authorization = request.headers.get("authorization")
            context = context_of(request)
            context.caller = keys.admit(authorization, self.access)
            if context.audit is not None:
                context.audit.key = context.caller.key.name
            if context.caller.limits is not None:
                context.caller.limits.take_request()
            return await handler(request)

        return guarded


class OpenRoute(GuardedRoute):
    """A route for everybody."""

    access = Access.OPEN


class UserRoute(GuardedRoute):
    """A route for callers with an API key, which sees what its key may use."""

    access = Access.USER


class OverviewRoute(GuardedRoute):
    """A route that tells of all adapters."""

    access = Access.OVERVIEW


class AdminRoute(GuardedRoute):
    """A route that changes what is served; each of its calls is a line of the audit log."""

    access = Access.ADMIN

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the guarded handler, so that refused calls are recorded too."""
        handler = super().get_route_handler()

        async def recorded(request: Request) -> Response:
            context = context_of(request)
            context.audit = begin_record(
                request, action=f"{request.method} {self.path}", request_id=context.request_id
            )
            with written(context.audit):
                return await handler(request)

        return recorded


def audit_of(request: Request) -> AuditRecord:
    """Return the record of the management call that is being served."""
    record = context_of(request).audit
    assert record is not None, "only management routes are recorded"
    return record
