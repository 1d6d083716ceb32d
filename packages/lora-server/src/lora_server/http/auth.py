"""Who may call which route. Each route declares its level through its class.

The key is checked before a body is read. Knows nothing of what the routes do.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from fastapi import Request, Response
from fastapi.routing import APIRoute

from lora_server.errors import AuthenticationError


class Access(StrEnum):
    """What a route asks of its caller."""

    OPEN = "open"
    """No key: probes and scrapers carry none."""
    USER = "user"
    """An API key or the admin key."""
    ADMIN = "admin"
    """The admin key; the API keys where no admin key is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeys:
    """The keys of the service. Without any key every route is open."""

    user: tuple[str, ...] = ()
    """Keys of ordinary callers."""
    admin: str | None = None
    """Key that management routes need, and that every other route takes as well."""

    def accepted(self, access: Access) -> tuple[str, ...]:
        """Keys that open a route of this level; empty means that no key is needed."""
        if access is Access.OPEN:
            return ()
        if self.admin is None:
            return self.user
        if access is Access.ADMIN:
            return (self.admin,)
        return (*self.user, self.admin) if self.user else ()

    def check(self, authorization: str | None, access: Access) -> None:
        """Raise `AuthenticationError` unless the `Authorization` header opens this level."""
        accepted = self.accepted(access)
        if not accepted:
            return
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise AuthenticationError("an API key is needed: send 'Authorization: Bearer KEY'")
        # Every key is compared, each in constant time, so that timing tells nothing of the match.
        given = token.strip().encode("latin-1", "replace")
        matches = [hmac.compare_digest(given, key.encode()) for key in accepted]
        if not any(matches):
            kind = "admin key" if access is Access.ADMIN and self.admin is not None else "API key"
            raise AuthenticationError(f"this is not a valid {kind} for this route")


class GuardedRoute(APIRoute):
    """A route that checks the key first. Use a subclass that names the level."""

    access: ClassVar[Access] = Access.ADMIN

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler, so that nothing is read from a caller without a key."""
        handler = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            keys: ApiKeys = request.app.state.service.keys
            keys.check(request.headers.get("authorization"), self.access)
            return await handler(request)

        return guarded


class OpenRoute(GuardedRoute):
    """A route for everybody."""

    access = Access.OPEN


class UserRoute(GuardedRoute):
    """A route for callers with an API key."""

    access = Access.USER


class AdminRoute(GuardedRoute):
    """A route that changes what is served."""

    access = Access.ADMIN
