"""Who calls, and which level of route a caller's key opens.

A key is only ever compared by its digest, with all known keys, and is never shown: logs and errors
have its name. Knows nothing of what the routes do.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final, Protocol

from lora_server.errors import AuthenticationError
from lora_server.http.limits import Clock, KeyLimits

ADMIN_NAME: Final = "admin"
"""Name of the key of `--admin-api-key`."""
_ALL: Final = ("*",)


class Access(StrEnum):
    """What a route asks of its caller. Each level includes those above it, but for its own rule."""

    OPEN = "open"
    """No key: probes carry none, and static files tell nothing."""
    USER = "user"
    """Any key."""
    OVERVIEW = "overview"
    """A key that may use everything, because the route tells of everything."""
    ADMIN = "admin"
    """A key for management; the ordinary keys of the command line where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key and what it is good for."""

    name: str
    """Shown in the audit log."""
    digest: bytes = field(repr=False)
    """SHA-256 of the key."""
    adapters: tuple[str, ...] = _ALL
    """Names, or patterns with `*`, `?` and `[...]`, of the adapters that exist for this key."""
    may_use_base: bool = True
    """Whether the base model alone exists for this key."""
    is_admin: bool = False
    """Whether it opens management routes."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    @property
    def sees_everything(self) -> bool:
        """Whether there is nothing that is hidden from this key."""
        return self.may_use_base and "*" in self.adapters

    def sees(self, adapter: str) -> bool:
        """Whether an adapter of this name exists for this key."""
        return any(adapter == item or fnmatchcase(adapter, item) for item in self.adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request."""

    key: ApiKey
    limits: KeyLimits | None = None
    """None where the key has no limits."""


ANYBODY: Final = Caller(key=ApiKey(name="anybody", digest=b""))
"""Who calls where no key is needed."""


class KeySource(Protocol):
    """Keys that may change while the service runs."""

    def current(self) -> Sequence[ApiKey]:
        """Return the keys of this moment."""
        ...

    def reload(self) -> None:
        """Read them again."""
        ...


class ApiKeys:
    """The keys of the service. Without any key every route is open."""

    def __init__(
        self,
        *,
        user: Sequence[str] = (),
        admin: str | None = None,
        file: KeySource | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Know the keys.

        Args:
            user: keys of ordinary callers.
            admin: key that opens every route, and management routes to nobody else.
            file: further keys, each with rights of its own.
            clock: tells the time, for the limits.
        """
        self._user = tuple(
            ApiKey(name=option_name(number), digest=digest_of(key))
            for number, key in enumerate(user, 1)
        )
        admins = () if admin is None else (admin,)
        self._admin = tuple(
            ApiKey(name=ADMIN_NAME, digest=digest_of(key), is_admin=True) for key in admins
        )
        self._file = file
        self._clock = clock
        self._limits: dict[str, KeyLimits] = {}

    def admit(self, authorization: str | None, access: Access) -> Caller:
        """Return who calls.

        Args:
            authorization: the header of this name.
            access: the route's level.

        Raises:
            AuthenticationError: there is no key, or one that does not open this level.
        """
        if access is Access.OPEN:
            return ANYBODY
        from_file = () if self._file is None else tuple(self._file.current())
        has_admin = bool(self._admin) or any(key.is_admin for key in from_file)
        needs_user = bool(self._user) or self._file is not None
        key = _find(authorization, (*self.fixed, *from_file))
        if key is None:
            if needs_user or (access is Access.ADMIN and has_admin):
                raise _refusal(authorization)
            return ANYBODY
        if not self._opens(key, access, has_admin=has_admin):
            raise AuthenticationError(f"the key {key.name!r} does not open this route")
        return Caller(key=key, limits=self._limits_of(key))

    @property
    def fixed(self) -> tuple[ApiKey, ...]:
        """The keys that are not from the file."""
        return (*self._user, *self._admin)

    def reload(self) -> None:
        """Read the file's keys again, if there is a file."""
        if self._file is not None:
            self._file.reload()

    def _opens(self, key: ApiKey, access: Access, *, has_admin: bool) -> bool:
        if access is Access.ADMIN:
            return key.is_admin or (key in self._user and not has_admin)
        return access is Access.USER or key.sees_everything

    def _limits_of(self, key: ApiKey) -> KeyLimits | None:
        """Return a key's allowances, which outlive a reload that does not change them."""
        rates = (key.requests_per_minute, key.tokens_per_minute)
        if rates == (None, None):
            self._limits.pop(key.name, None)
            return None
        known = self._limits.get(key.name)
        if known is None or known.rates != rates:
            known = KeyLimits(
                requests_per_minute=rates[0], tokens_per_minute=rates[1], clock=self._clock
            )
            self._limits[key.name] = known
        return known


def digest_of(key: str) -> bytes:
    """Return what is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


def option_name(number: int) -> str:
    """Return the name of one of the keys of `--api-key`, counted from 1."""
    return f"api-key-{number}"


def _find(authorization: str | None, keys: Iterable[ApiKey]) -> ApiKey | None:
    """Return the key that the header carries.

    All digests are compared, each in constant time, so that timing tells nothing of a key.
    """
    token = _token(authorization)
    if token is None:
        return None
    given = hashlib.sha256(token).digest()
    found: ApiKey | None = None
    for key in keys:
        if hmac.compare_digest(given, key.digest):
            found = key
    return found


def _token(authorization: str | None) -> bytes | None:
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        return None
    # ASGI hands headers over as Latin-1; the bytes are those of the key in UTF-8.
    return token.strip().encode("latin-1", "replace")


def _refusal(authorization: str | None) -> AuthenticationError:
    if _token(authorization) is None:
        return AuthenticationError("an API key is needed: send 'Authorization: Bearer KEY'")
    return AuthenticationError("this is not a valid API key")
