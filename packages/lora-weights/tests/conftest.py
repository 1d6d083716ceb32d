"""A web server that serves bytes from memory and can misbehave in the ways that networks do."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass
class Request:
    """One request as it arrived, and what was sent."""

    path: str
    query: str
    headers: dict[str, str]
    status: int = 0
    sent: int = 0


@dataclass
class FileServer:
    """What to serve, how, and what was asked for."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    """Path with a leading slash -> content."""
    requests: list[Request] = field(default_factory=list)
    etag: str = "strong"
    """What identifies content: strong, weak, date (an old one), fresh (a date of now), none."""
    cuts: list[int] = field(default_factory=list)
    """Bytes after which the next answers with content are cut off."""
    declared: int | None = None
    """Content-Length to declare in place of the true one."""
    is_chunked: bool = False
    """Send without a declared length."""
    has_ranges: bool = True
    """Honour Range."""
    statuses: dict[str, int] = field(default_factory=dict)
    """Path -> status to answer with."""
    redirects: dict[str, str] = field(default_factory=dict)
    """Path -> address to redirect to."""
    authorization: str | None = None
    """Value that the Authorization header must have."""
    routes: list[Callable[[Any, Request], bool]] = field(default_factory=list)
    """Further answers: called with the handler and the request, true when it answered."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put_folder(self, folder: Path, at: str) -> None:
        """Serve the files of a folder below a path."""
        for path in folder.iterdir():
            self.files[f"{at}/{path.name}"] = path.read_bytes()

    def sent(self, name: str) -> int:
        """Return how many bytes of a file were sent, in all requests together."""
        return sum(r.sent for r in self.requests if r.path.endswith(f"/{name}"))

    def refusal(self, request: Request) -> int | None:
        """Return the status of a request that must not succeed."""
        if self.authorization not in (None, request.headers.get("Authorization")):
            return 401
        return self.statuses.get(request.path)

    def is_current(self, request: Request, content: bytes) -> bool:
        """Return whether the client says that it has this content."""
        version = self.version(content)
        tag, date = (request.headers.get(f"If-{key}") for key in ("None-Match", "Modified-Since"))
        return (tag is not None and tag == version.get("ETag")) or (
            date is not None and date == version.get("Last-Modified")
        )

    def span(self, request: Request, content: bytes) -> range:
        """Return which bytes a request is answered with."""
        wanted = request.headers.get("Range", "")
        condition = request.headers.get("If-Range")
        is_current = condition is None or condition in self.version(content).values()
        if not (wanted.startswith("bytes=") and self.has_ranges and is_current):
            return range(len(content))
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        return range(int(first), min(int(last) + 1, len(content)) if last else len(content))

    def version(self, content: bytes) -> dict[str, str]:
        """Return the headers that identify a content."""
        tag = f'"{hashlib.md5(content).hexdigest()}"'
        return {
            "strong": {"ETag": tag},
            "weak": {"ETag": f"W/{tag}"},
            "date": {"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"},
            "fresh": {"Last-Modified": "Fri, 01 Jan 2100 00:00:00 GMT"},
            "none": {},
        }[self.etag]


class Handler(BaseHTTPRequestHandler):
    """Answers from the state of a `FileServer`."""

    protocol_version = "HTTP/1.1"
    state: FileServer

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        headers = {key.title(): value for key, value in self.headers.items()}
        request = Request(unquote(parts.path), parts.query, headers)
        with self.state.lock:
            self.state.requests.append(request)
        self.close_connection = True
        if any(route(self, request) for route in self.state.routes):
            return
        status = self.state.refusal(request)
        content = self.state.files.get(request.path)
        if request.path in self.state.redirects:
            self.answer(request, 302, {"Location": self.state.redirects[request.path]})
        elif status is not None or content is None:
            self.answer(request, status or 404)
        elif self.state.is_current(request, content):
            self.answer(request, 304, self.state.version(content))
        else:
            self._content(request, content)

    def answer(
        self,
        request: Request,
        status: int,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
    ) -> None:
        """Answer in one piece."""
        request.status = status
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def _content(self, request: Request, content: bytes) -> None:
        span = self.state.span(request, content)
        if span.start >= len(content) > 0:
            self.answer(request, 416)
            return
        body = content[span.start : span.stop]
        is_range = span != range(len(content))
        request.status = 206 if is_range else 200
        self.send_response(request.status)
        for key, value in self.state.version(content).items():
            self.send_header(key, value)
        if is_range:
            place = f"bytes {span.start}-{span.stop - 1}/{len(content)}"
            self.send_header("Content-Range", place)
        if self.state.is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            declared = self.state.declared
            self.send_header("Content-Length", str(len(body) if declared is None else declared))
        self.end_headers()
        with self.state.lock:
            cut = self.state.cuts.pop(0) if self.state.cuts else len(body)
        self._send(request, body[:cut], is_whole=cut >= len(body))

    def _send(self, request: Request, body: bytes, *, is_whole: bool) -> None:
        is_chunked = self.state.is_chunked
        try:
            for i in range(0, len(body), 4096):
                piece = body[i : i + 4096]
                framed = b"%x\r\n" % len(piece) + piece + b"\r\n"
                self.wfile.write(framed if is_chunked else piece)
                request.sent += len(piece)
            if is_chunked and is_whole:
                self.wfile.write(b"0\r\n\r\n")
        except ConnectionError:
            return  # the client has what it wanted


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """Start a server on a port of its own; stop it afterwards."""
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web:
        state = FileServer(url=f"http://127.0.0.1:{web.server_address[1]}")
        web.RequestHandlerClass = type("BoundHandler", (Handler,), {"state": state})
        thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        web.shutdown()
        thread.join()
