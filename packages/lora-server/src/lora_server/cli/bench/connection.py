"""HTTP for a load test: what it takes to send many requests and to note when each byte arrives.

httpx spends five times as long on a streamed token, on cores that the client may share with the
server it measures. Parsing is httptools', as in the server; the body is handed on as it arrives,
without a task's turn in between. Knows nothing of events or answers.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import urlsplit

import httptools

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

_CONNECT_TIMEOUT_S = 10.0
_FIRST_FINAL = 200


class ConnectionFailedError(Exception):
    """There is no connection, or it ended before the reply did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back; the body has been handed on."""

    status: int


class LoadClient:
    """Sends requests to one server over connections that are kept. Belongs to one event loop."""

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float) -> None:
        """Make the client; connections are opened as they are needed.

        Args:
            base_url: address of the server, without `/v1`.
            api_key: sent with each request.
            timeout_s: bound on one exchange.
        """
        url = urlsplit(base_url)
        self.base_url = base_url
        self._host = url.hostname or ""
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._tls else 80)
        self._prefix = url.path.rstrip("/")
        self._timeout_s = timeout_s
        head = {"Host": url.netloc.rpartition("@")[2], "User-Agent": "lora-server-bench"}
        if api_key:
            head["Authorization"] = f"Bearer {api_key}"
        self._head = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().close()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body.

        Raises:
            ConnectionFailedError: there was no whole reply.
        """
        body = bytearray()
        reply = await self._exchange(self._request("GET", path), lambda _, data: body.extend(data))
        return reply.status, bytes(body)

    async def post(self, path: str, body: Any, on_data: Callable[[int, bytes], None]) -> Reply:
        """Send JSON; call `on_data` with the status and each piece of the body as it arrives.

        Raises:
            ConnectionFailedError: there was no whole reply.
        """
        content = json.dumps(body, separators=(",", ":")).encode()
        return await self._exchange(self._request("POST", path, content), on_data)

    def _request(self, method: str, path: str, content: bytes | None = None) -> bytes:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}"
        if content is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        return f"{head}\r\n".encode() + (content or b"")

    async def _exchange(self, request: bytes, on_data: Callable[[int, bytes], None]) -> Reply:
        try:
            async with asyncio.timeout(self._timeout_s), self._connection() as connection:
                return await connection.exchange(request, on_data)
        except TimeoutError:
            raise ConnectionFailedError(f"no reply within {self._timeout_s:g} s") from None

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[_Connection]:
        """Lend a connection; one on which an exchange did not end well is not used again."""
        connection = await self._idle_or_new()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)

    async def _idle_or_new(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    _Connection, self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            where = f"{self._host}:{self._port}"
            raise ConnectionFailedError(f"{where} does not answer") from None
        except OSError as error:
            raise ConnectionFailedError(str(error)) from error
        return connection


class _Connection(asyncio.Protocol):
    """One exchange after the other."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[Reply] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._on_data: Callable[[int, bytes], None] = lambda _status, _data: None
        self._status = 0

    async def exchange(self, request: bytes, on_data: Callable[[int, bytes], None]) -> Reply:
        """Send a request and wait for the end of its reply."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._on_data = on_data
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._reply

    def close(self) -> None:
        """Close the connection, whatever is on its way."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Parse what has come; between exchanges nothing should."""
        if self._parser is None or self._reply is None or self._reply.done():
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self.is_open = False
        reason = "" if exc is None else f": {exc}"
        self._fail(f"the connection was closed before the reply was complete{reason}")

    def _fail(self, text: str) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(ConnectionFailedError(text))

    # -- httptools' callbacks

    def on_headers_complete(self) -> None:
        """Note the status."""
        assert self._parser is not None
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Hand on a piece of the body."""
        self._on_data(self._status, body)

    def on_message_complete(self) -> None:
        """End the exchange, unless this was only an interim reply."""
        assert self._parser is not None
        if self._status < _FIRST_FINAL:
            return
        if not self._parser.should_keep_alive():
            self.is_open = False
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(Reply(status=self._status))
