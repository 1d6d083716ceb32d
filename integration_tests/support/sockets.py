"""Clients that behave as no client library does: slow, silent, half gone, or not reading."""

from __future__ import annotations

import json
import socket
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_TIMEOUT_S = 30.0


def request_bytes(path: str, content: Mapping[str, Any], *, close: bool = True) -> bytes:
    """Return a whole POST request."""
    body = json.dumps(content).encode()
    connection = "close" if close else "keep-alive"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: {connection}\r\n\r\n"
    )
    return head.encode() + body


@contextmanager
def connected(url: str, *, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    """Yield a socket that is connected to a server.

    Args:
        url: the server's.
        receive_buffer: bytes that are taken before anything is read; None is the system's choice.
    """
    parts = urlsplit(url)
    with socket.socket() as client:
        client.settimeout(_TIMEOUT_S)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.connect((parts.hostname, parts.port))
        yield client


def read_all(client: socket.socket) -> bytes:
    """Return everything up to the end, or up to the point where the server cut the connection."""
    received = bytearray()
    try:
        while piece := client.recv(2**16):
            received += piece
    except ConnectionError:
        pass
    return bytes(received)


def status_of(answer: bytes) -> int:
    """Return an answer's status."""
    version, status, *_ = answer.split(b" ", 2)
    assert version == b"HTTP/1.1", answer[:200]
    return int(status)


def content_of(answer: bytes) -> Any:
    """Return the JSON of an answer that was not sent in chunks."""
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def vanish(client: socket.socket) -> None:
    """End a connection with a reset, as when a process is killed with unread data."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
