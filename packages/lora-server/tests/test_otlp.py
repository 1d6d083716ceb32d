"""Spans as a collector receives them, decoded by OpenTelemetry's own messages."""

from __future__ import annotations

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from lora_server.cli.build_observers import build_observers
from lora_server.config import ServerConfig
from lora_server.errors import StartupError
from lora_server.exchange import Exchange
from lora_server.metrics import Outcome, RequestRecord
from lora_server.otlp import OtlpTraces, full_endpoint
from lora_server.traces import TracedLoad, TracedRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

NOW_NS = 1_700_000_000_000_000_000
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = Exchange(
    request_id="r-1", traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01", tracestate="vendor=1"
)


class Collector:
    """Takes what is posted to it."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.received: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.paths.append(self.path)
                collector.received.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def spans(self) -> list[Span]:
        return [
            span
            for request in self.received
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def traces(collector: Collector) -> OtlpTraces:
    return OtlpTraces(collector.url, version="9.9", now_ns=lambda: NOW_NS)


def attributes(span: Span) -> dict[str, object]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value") or "") for a in span.attributes}


def request(**fields: Any) -> TracedRequest:
    defaults: dict[str, Any] = {
        "operation": "chat",
        "model": "sql",
        "base": "base-model",
        "adapter_name": "sql",
        "adapter_digests": ("ab" * 32,),
        "response_id": "chatcmpl-1",
        "exchange": None,
    }
    return TracedRequest(**(defaults | fields))


def record(**fields: Any) -> RequestRecord:
    defaults: dict[str, Any] = {
        "adapter": "sql",
        "outcome": Outcome.OK,
        "error": None,
        "num_prompt_tokens": 7,
        "num_cached_tokens": 3,
        "num_tokens": 5,
        "queue_s": 0.25,
        "first_token_s": 0.5,
        "token_gap_s": 0.1,
        "duration_s": 2.0,
        "is_answered": True,
    }
    return RequestRecord(**(defaults | fields))


def test_a_request_is_a_span_with_the_attributes_of_the_conventions(
    collector: Collector, traces: OtlpTraces
) -> None:
    traces.record_request(request(exchange=PARENT), record())
    traces.close()

    (span,) = collector.spans()
    assert collector.paths == ["/v1/traces"]
    assert (span.name, span.kind) == ("chat sql", Span.SPAN_KIND_SERVER)
    assert span.end_time_unix_nano == NOW_NS
    assert span.end_time_unix_nano - span.start_time_unix_nano == 2_000_000_000
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert attributes(span) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "lora-server",
        "gen_ai.request.model": "sql",
        "gen_ai.response.model": "sql",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.request.id": "r-1",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.latency.e2e": 2.0,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_to_first_token": 0.5,
        "gen_ai.response.time_to_first_chunk": 0.5,
        "lora.base.name": "base-model",
        "lora.adapter.name": "sql",
        "lora.adapter.digest": "ab" * 32,
        "lora.request.outcome": "ok",
    }


def test_the_callers_span_is_the_parent(collector: Collector, traces: OtlpTraces) -> None:
    traces.record_request(request(exchange=PARENT), record())
    traces.close()

    (span,) = collector.spans()
    assert span.trace_id.hex() == TRACE_ID
    assert span.parent_span_id.hex() == PARENT_ID
    assert span.trace_state == "vendor=1"


@pytest.mark.parametrize("traceparent", [None, "", "nonsense", "00-0-0-01"])
def test_without_a_valid_parent_a_trace_begins(
    traceparent: str | None, collector: Collector, traces: OtlpTraces
) -> None:
    exchange = Exchange(request_id="r-2", traceparent=traceparent)

    traces.record_request(request(exchange=exchange), record())
    traces.close()

    (span,) = collector.spans()
    assert span.parent_span_id == b""
    assert len(span.trace_id) == 16


def test_a_parent_that_is_not_sampled_makes_no_span(
    collector: Collector, traces: OtlpTraces
) -> None:
    exchange = Exchange(request_id="r-3", traceparent=f"00-{TRACE_ID}-{PARENT_ID}-00")

    traces.record_request(request(exchange=exchange), record())
    traces.close()

    assert collector.spans() == []


def test_a_failure_tells_its_kind_and_not_its_text(
    collector: Collector, traces: OtlpTraces
) -> None:
    failed = record(
        outcome=Outcome.ERROR, error=ValueError("the prompt"), first_token_s=None, queue_s=None
    )

    traces.record_request(request(), failed)
    traces.close()

    (span,) = collector.spans()
    told = attributes(span)
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert told["error.type"] == "ValueError"
    assert told["lora.request.outcome"] == "error"
    assert not [name for name in told if "time_to_first" in name or "queue" in name]
    assert b"the prompt" not in span.SerializeToString()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"adapter_name": None, "adapter_digests": ()}, {}),
        (
            {"adapter_name": "weighted_set", "adapter_digests": ("aa", "bb")},
            {"lora.adapter.name": "weighted_set", "lora.adapter.digests": ["aa", "bb"]},
        ),
    ],
)
def test_the_base_and_weighted_sets_are_told_apart(
    fields: dict[str, Any],
    expected: dict[str, Any],
    collector: Collector,
    traces: OtlpTraces,
) -> None:
    traces.record_request(request(**fields), record())
    traces.close()

    (span,) = collector.spans()
    told = {k: v for k, v in attributes(span).items() if k.startswith("lora.adapter")}
    if "lora.adapter.digests" in told:
        values: Any = told["lora.adapter.digests"]
        told["lora.adapter.digests"] = [value.string_value for value in values.values]
    assert told == expected


def test_a_load_is_a_span_with_its_stage(collector: Collector, traces: OtlpTraces) -> None:
    load = TracedLoad(
        stage="disk",
        name="sql",
        digest="abc",
        size_bytes=4096,
        seconds=0.5,
        error=None,
        exchange=PARENT,
    )
    traces.record_load(load)
    traces.close()

    (span,) = collector.spans()
    assert (span.name, span.kind) == ("load_adapter sql", Span.SPAN_KIND_INTERNAL)
    assert span.parent_span_id.hex() == PARENT_ID
    assert span.end_time_unix_nano - span.start_time_unix_nano == 500_000_000
    assert attributes(span) == {
        "lora.load.stage": "disk",
        "lora.adapter.name": "sql",
        "lora.adapter.digest": "abc",
        "lora.adapter.bytes": 4096,
        "gen_ai.request.id": "r-1",
    }


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, "lora-server"), ({"OTEL_SERVICE_NAME": "team-a"}, "team-a")],
)
def test_the_service_has_a_name(
    variables: dict[str, str],
    expected: str,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    traces = OtlpTraces(collector.url, version="9.9")

    traces.record_request(request(), record())
    traces.close()

    (resource,) = collector.received[0].resource_spans
    told = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert told["service.name"] == expected


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("http://c:4318/v1/traces", "http://c:4318/v1/traces"),
        ("https://c/team/otlp", "https://c/team/otlp"),
    ],
)
def test_an_address_without_a_path_gets_that_of_otlp(endpoint: str, expected: str) -> None:
    assert full_endpoint(endpoint) == expected


def test_without_the_flag_there_are_no_traces_and_their_library_is_not_imported() -> None:
    program = (
        "import sys; from lora_server.cli.build_observers import build_observers;"
        "from lora_server.config import ServerConfig;"
        "assert build_observers(ServerConfig(model='m')).traces is None;"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_missing_extra_is_told_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lora_server.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    config = ServerConfig(model="m", otlp_traces_endpoint="http://c:4318")

    with pytest.raises(StartupError, match=r"needs the extra otel.*lora-server\[otel\]"):
        build_observers(config)
