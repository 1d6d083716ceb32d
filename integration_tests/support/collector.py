"""A collector of OpenTelemetry traces: takes what is posted and decodes it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Spans that were received."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []

    def take(self, body: bytes) -> None:
        """Decode what was posted."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)


def attributes(span: Span) -> dict[str, Any]:
    """Return a span's attributes that are single values."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value") or "") for a in span.attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """Listen on a free port while the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
