"""Bodies that are too large or too slow: refused while they arrive, in the one shape."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from lora_server.http.body_limit import BodyLimits
from lora_server.http.keys import ApiKeys

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Harness

PATH = "/v1/completions"
LIMITS = BodyLimits(max_bytes=1000, timeout_s=30.0, linger_s=0.01)


class Exchange:
    """One request as the HTTP server hands it over, piece by piece."""

    def __init__(self, *chunks: bytes | None, declared: int | None = None) -> None:
        self.chunks = list(chunks)
        """None: the client sends nothing more."""
        self.declared = declared
        self.num_read = 0
        self.sent: list[Any] = []

    async def receive(self) -> Any:
        if not self.chunks:
            await asyncio.Event().wait()
        chunk = self.chunks.pop(0)
        if chunk is None:
            await asyncio.Event().wait()
        self.num_read += len(chunk or b"")
        return {"type": "http.request", "body": chunk, "more_body": bool(self.chunks)}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def run(self, harness: Harness, *, key: str | None = None) -> tuple[int, dict[str, str], Any]:
        headers = [(b"content-type", b"application/json")]
        if self.declared is not None:
            headers.append((b"content-length", str(self.declared).encode()))
        if key is not None:
            headers.append((b"authorization", b"Bearer " + key.encode()))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": PATH,
            "raw_path": PATH.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
            "headers": headers,
        }
        asyncio.run(asyncio.wait_for(harness.app(scope, self.receive, self.send), 10))
        starts = [m for m in self.sent if m["type"] == "http.response.start"]
        assert len(starts) == 1
        assert not self.sent[-1].get("more_body", False)
        content = b"".join(m.get("body", b"") for m in self.sent[1:])
        found = {name.decode(): value.decode() for name, value in starts[0]["headers"]}
        return starts[0]["status"], found, json.loads(content)


@pytest.fixture
def harness(make_harness: Callable[..., Harness]) -> Harness:
    harness = make_harness(body_limits=LIMITS)
    harness.says("hello")
    return harness


def body(num_bytes: int) -> bytes:
    """Return a valid body of exactly this size."""
    content = json.dumps({"prompt": "the cat"}).encode()
    return content[:-1] + b" " * (num_bytes - len(content)) + b"}"


def test_a_body_as_large_as_allowed_is_read(harness: Harness) -> None:
    whole = body(1000)

    status, _, _ = Exchange(whole[:400], whole[400:], declared=1000).run(harness)

    assert status == 200


def test_a_declared_length_beyond_the_bound_is_refused_before_anything_is_read(
    harness: Harness,
) -> None:
    exchange = Exchange(None, declared=1001)

    status, headers, reply = exchange.run(harness)

    assert (status, exchange.num_read) == (413, 0)
    assert headers["connection"] == "close"
    assert "x-request-id" in headers
    assert reply["error"]["code"] == "request_too_large"
    assert "1001" in reply["error"]["message"]
    assert "1000" in reply["error"]["message"]


def test_a_chunked_body_is_refused_as_soon_as_it_is_too_large(harness: Harness) -> None:
    exchange = Exchange(*[b" " * 100] * 11, None)

    status, _, reply = exchange.run(harness)

    assert (status, exchange.num_read) == (413, 1100)
    assert reply["error"]["type"] == "invalid_request_error"
    assert harness.engine.requests == []


def test_the_rest_of_a_refused_body_is_read_so_that_the_answer_arrives(harness: Harness) -> None:
    exchange = Exchange(*[b" " * 600] * 5, declared=3000)

    status, _, _ = exchange.run(harness)

    assert (status, exchange.num_read) == (413, 3000)


def test_a_body_that_does_not_arrive_is_refused(make_harness: Callable[..., Harness]) -> None:
    limits = BodyLimits(max_bytes=1000, timeout_s=0.02, linger_s=0.01)
    harness = make_harness(body_limits=limits)

    status, headers, reply = Exchange(b'{"prompt"', None, declared=50).run(harness)

    assert status == 408
    assert reply["error"]["code"] == "request_timeout"
    assert headers["connection"] == "close"


def test_a_caller_without_a_key_is_refused_without_reading(
    make_harness: Callable[..., Harness],
) -> None:
    harness = make_harness(body_limits=LIMITS, keys=ApiKeys(user=("K",)))

    for declared in (500, 5000):
        exchange = Exchange(None, declared=declared)

        assert exchange.run(harness)[0] == 401
        assert exchange.num_read == 0
