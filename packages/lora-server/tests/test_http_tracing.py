"""What the routes tell of a request when traces are wanted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from lora_server.engine.messages import RequestFailed
from lora_server.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Harness

    from lora_server.metrics import RequestRecord
    from lora_server.traces import TracedLoad, TracedRequest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Spans:
    requests: list[tuple[TracedRequest, RequestRecord]] = field(default_factory=list)

    def record_request(self, request: TracedRequest, record: RequestRecord) -> None:
        self.requests.append((request, record))

    def record_load(self, load: TracedLoad) -> None:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def traced(make_harness: Callable[..., Harness], spans: Spans) -> Harness:
    harness = make_harness(traces=spans)
    harness.says("hello world")
    return harness


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_is_told_once_with_who_answered_and_who_asked(
    path: str, is_stream: bool, traced: Harness, spans: Spans
) -> None:
    is_chat = "chat" in path
    body = CHAT if is_chat else {"prompt": "x"}
    headers = {"X-Request-Id": "id-7", "traceparent": "00-a-b-01", "tracestate": "v=1"}

    traced.post(path, {**body, "model": "sql", "stream": is_stream}, headers=headers)

    ((request, record),) = spans.requests
    assert (request.operation, request.model, request.base) == (
        "chat" if is_chat else "text_completion",
        "sql",
        "base-model",
    )
    assert request.adapter_name == "sql"
    assert [digest[:6] for digest in request.adapter_digests] == ["73716c"]
    assert request.response_id.startswith("chatcmpl-" if is_chat else "cmpl-")
    assert request.exchange is not None
    assert request.exchange.request_id == "id-7"
    assert request.exchange.traceparent == "00-a-b-01"
    assert request.exchange.tracestate == "v=1"
    assert (record.num_tokens, record.outcome) == (2, "ok")


def test_the_base_alone_has_no_adapter(traced: Harness, spans: Spans) -> None:
    traced.post("/v1/completions", {"prompt": "x"})

    ((request, _),) = spans.requests
    assert (request.adapter_name, request.adapter_digests) == (None, ())


def test_a_failed_request_is_told_with_its_error(traced: Harness, spans: Spans) -> None:
    error = EngineError("broken")
    traced.engine.script = lambda request: [
        RequestFailed(request_id=request.request_id, error=error)
    ]

    traced.post("/v1/completions", {"prompt": "x"})

    ((_, record),) = spans.requests
    assert (record.outcome, record.error) == ("error", error)


def test_a_client_that_leaves_is_told(traced: Harness, spans: Spans) -> None:
    traced.says("hello", finish=None)

    traced.leave("/v1/completions", {"prompt": "x", "stream": True}, after_chunks=1)

    ((_, record),) = spans.requests
    assert record.outcome == "cancelled"
