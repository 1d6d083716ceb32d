"""One connection's bounds, over real sockets: heads, slow senders, readers that stop."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn

from lora_server.cli.connections import ConnectionConfig, ConnectionLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from starlette.types import Receive, Scope, Send

WITHIN_S = 20.0
"""Only a test that fails waits so long."""
GET = b"GET / HTTP/1.1\r\nhost: test\r\n"


class App:
    """Answers at once, or sends without an end; notes how its exchanges end."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_calls += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/endless":
            await self.flood(receive, send)
        await send({"type": "http.response.body", "body": b"fine"})

    async def flood(self, receive: Receive, send: Send) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.ended.set()

        watcher = asyncio.create_task(watch())
        while not self.ended.is_set():
            message = {"type": "http.response.body", "body": b"x" * 65536, "more_body": True}
            await send(message)
            await asyncio.sleep(0)
        await watcher


@asynccontextmanager
async def listening(app: App, limits: ConnectionLimits) -> AsyncIterator[int]:
    config = ConnectionConfig(
        app, limits=limits, port=0, log_config=None, ws="none", lifespan="off", access_log=False
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        await server.shutdown()


def run(limits: ConnectionLimits, client: Callable[[int, App], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        app = App()
        async with listening(app, limits) as port:
            await client(port, app)

    asyncio.run(asyncio.wait_for(main(), WITHIN_S))


async def talk(port: int, *parts: bytes) -> bytes:
    """Send the parts, each in its own packet, and return everything up to the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0)
    answer = await reader.read()
    writer.close()
    return answer


def error_of(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    error: dict[str, Any] = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([GET + b"x-long: " + b"a" * 3000 + b"\r\n\r\n"], "expected at most 2000"),
        ([GET + b"x-long: ", *([b"a" * 500] * 5)], "more than 2000"),
        ([b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nhost: test\r\n\r\n"], "expected at most 2000"),
        ([b"GET /", *([b"a" * 500] * 5)], "more than 2000"),
        ([GET, b"".join(b"x-%d: 1\r\n" % i for i in range(30)), b"\r\n"], "31 headers"),
    ],
    ids=["long", "endless", "long address", "endless address", "many"],
)
def test_a_head_beyond_the_bounds_is_refused(parts: list[bytes], told: str) -> None:
    async def client(port: int, app: App) -> None:
        answer = await talk(port, *parts)

        assert answer.startswith(b"HTTP/1.1 431 ")
        error = error_of(answer)
        assert error["code"] == "headers_too_large"
        assert told in error["message"]
        assert app.num_calls == 0
        assert await talk(port, GET + b"connection: close\r\n\r\n")

    run(ConnectionLimits(max_head_bytes=2000, max_headers=30), client)


def test_a_long_body_is_not_counted_as_head() -> None:
    async def client(port: int, app: App) -> None:
        head = b"POST / HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-length: 9000\r\n\r\n"

        assert (await talk(port, head + b"b" * 9000)).startswith(b"HTTP/1.1 200 ")

    run(ConnectionLimits(max_head_bytes=2000), client)


def test_what_is_no_http_is_refused_in_the_one_shape() -> None:
    async def client(port: int, app: App) -> None:
        answer = await talk(port, b"nonsense\r\n\r\n")

        assert answer.startswith(b"HTTP/1.1 400 ")
        assert error_of(answer)["code"] == "invalid_request"
        assert app.num_calls == 0

    run(ConnectionLimits(), client)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", GET + b"x-slow: "], ids=["nothing", "a", "b"])
def test_a_client_that_sends_no_whole_head_is_closed(sent: bytes) -> None:
    async def client(port: int, app: App) -> None:
        assert await talk(port, sent) == b""
        assert app.num_calls == 0

    run(ConnectionLimits(header_timeout_s=0.05), client)


def test_a_connection_that_was_used_is_closed_when_the_next_head_does_not_end() -> None:
    async def client(port: int, app: App) -> None:
        answer = await talk(port, GET + b"\r\n", b"GET / HTTP/1.1\r\nx-slow: ")

        assert answer.startswith(b"HTTP/1.1 200 ")
        assert app.num_calls == 1

    run(ConnectionLimits(header_timeout_s=0.05, keep_alive_s=1), client)


def test_a_client_that_stops_reading_is_cut_off_and_its_exchange_ends() -> None:
    async def client(port: int, app: App) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /endless HTTP/1.1\r\nhost: t\r\n\r\n")
        await app.ended.wait()
        writer.transport.abort()
        del reader

    run(ConnectionLimits(write_timeout_s=0.05), client)


def test_a_client_that_reads_slowly_is_served_to_the_end() -> None:
    async def client(port: int, app: App) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /endless HTTP/1.1\r\nhost: t\r\n\r\n")
        num_bytes = 0
        while num_bytes < 50_000_000:
            num_bytes += len(await reader.read(1_000_000))
        assert not app.ended.is_set()
        writer.close()
        await app.ended.wait()

    run(ConnectionLimits(write_timeout_s=5.0), client)
