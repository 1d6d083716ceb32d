"""The load test's connections against a server that says exactly what a test wants."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from lora_server.cli.bench.connection import ConnectionFailedError, LoadClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

REPLY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Peer:
    """Answers each request with the next of its replies; None closes the connection."""

    def __init__(self, *replies: bytes | None) -> None:
        self.replies = list(replies)
        self.requests: list[bytes] = []
        self.num_connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while self.replies:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.split(b"\r\n") if b"Content-Length" in line]
                body = await reader.readexactly(int(length[0].split()[1])) if length else b""
                self.requests.append(head + body)
                reply = self.replies.pop(0)
                if reply is None:
                    return
                writer.write(reply)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


def talk(peer: Peer, work: Callable[[LoadClient], Awaitable[Any]], prefix: str = "") -> Any:
    async def main() -> Any:
        server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}{prefix}"
        try:
            async with LoadClient(url, api_key="K", timeout_s=5) as client:
                return await work(client)
        finally:
            server.close()

    return asyncio.run(main())


def test_a_request_names_the_host_and_the_key_below_the_addresss_path() -> None:
    peer = Peer(REPLY)

    async def ask(client: LoadClient) -> int:
        return (await client.post("/v1/completions", {"a": "é"}, lambda _s, _d: None)).status

    status = talk(peer, ask, prefix="/openai/")

    assert status == 200
    head, _, body = peer.requests[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /openai/v1/completions HTTP/1.1"
    assert b"Authorization: Bearer K" in lines
    assert any(line.startswith(b"Host: 127.0.0.1:") for line in lines)
    assert body == b'{"a":"\\u00e9"}'


def test_connections_are_used_again() -> None:
    peer = Peer(REPLY, REPLY, REPLY)

    async def ask(client: LoadClient) -> list[tuple[int, bytes]]:
        return [await client.get("/a") for _ in range(3)]

    assert talk(peer, ask) == [(200, b"ok")] * 3
    assert peer.num_connections == 1


def test_a_connection_that_is_to_be_closed_is_not_used_again() -> None:
    last = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
    peer = Peer(last, REPLY)

    async def ask(client: LoadClient) -> list[tuple[int, bytes]]:
        return [await client.get("/a") for _ in range(2)]

    assert talk(peer, ask) == [(200, b"ok")] * 2
    assert peer.num_connections == 2


def test_an_interim_reply_is_passed_over() -> None:
    peer = Peer(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + REPLY)

    assert talk(peer, lambda client: client.get("/a")) == (200, b"ok")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (None, "closed before the reply was complete"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", "closed before the reply"),
        (b"220 mail.example ESMTP\r\n", "no HTTP"),
    ],
)
def test_half_a_reply_is_a_failure_of_its_request_alone(reply: bytes | None, words: str) -> None:
    peer = Peer(reply)

    async def ask(client: LoadClient) -> tuple[int, bytes]:
        with pytest.raises(ConnectionFailedError, match=words):
            await client.get("/a")
        peer.replies = [REPLY]
        return await client.get("/b")

    assert talk(peer, ask) == (200, b"ok")
    assert peer.num_connections == 2
