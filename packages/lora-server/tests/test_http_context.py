"""Ids of requests, and the headers that every reply carries."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from lora_server.engine.messages import RequestFailed
from lora_server.errors import EngineError
from lora_server.logs import fields_of

if TYPE_CHECKING:
    from conftest import Harness


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nothing", "/metrics"])
def test_every_reply_has_an_id(harness: Harness, path: str) -> None:
    one, other = harness.get(path), harness.get(path)

    assert len(one.headers["x-request-id"]) == 32
    assert one.headers["x-request-id"] != other.headers["x-request-id"]


def test_a_clients_id_comes_back(harness: Harness) -> None:
    response = harness.get("/health", headers={"X-Request-Id": "client-1"})

    assert response.headers["x-request-id"] == "client-1"


@pytest.mark.parametrize("sent", ["", "x" * 129, "tab\tbed", b"\xfc"])
def test_an_id_that_cannot_stand_in_a_log_is_replaced(harness: Harness, sent: str | bytes) -> None:
    response = harness.get("/health", headers=[(b"x-request-id", sent)])

    assert len(response.headers["x-request-id"]) == 32


def test_the_clients_id_need_not_be_unique_for_the_engine(harness: Harness) -> None:
    for _ in range(2):
        harness.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": "same"})

    assert len({request.request_id for request in harness.engine.requests}) == 2


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [
        {"level": record.levelname, "message": record.getMessage(), **fields_of(record)}
        for record in caplog.records
        if record.name.startswith("lora_server")
    ]


def test_each_request_is_one_line_with_its_id_and_what_answered(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        harness.post(
            "/v1/completions?x=secret",
            {"model": "sql", "prompt": "a"},
            headers={"X-Request-Id": "id-7"},
        )

    (line,) = lines(caplog)
    assert line.pop("ms") > 0
    assert line == {
        "level": "INFO",
        "message": "Request done",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "adapter": "sql@73716c000000",
    }


def test_probes_and_scrapes_are_lines_for_debugging_only(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        harness.get("/health")

    assert [line["level"] for line in lines(caplog)] == ["DEBUG"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_every_line_of_a_request_has_its_id_and_none_has_its_prompt(
    is_stream: bool, harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    written: list[dict[str, Any]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append({"text": self.format(record), **fields_of(record)})

    handler = Handler()
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        with caplog.at_level(logging.DEBUG):
            for outcome in (EngineError("out of memory"), RuntimeError("broken")):
                harness.engine.script = lambda request, error=outcome: [  # type: ignore[misc]
                    RequestFailed(request_id=request.request_id, error=error)
                ]
                harness.post(
                    "/v1/completions",
                    {"prompt": "my secret diary", "stream": is_stream, "model": "sql"},
                    headers={"X-Request-Id": "id-7"},
                )
    finally:
        root.removeHandler(handler)

    ours = [line for line in written if "Request done" in line["text"] or "id-7" in line["text"]]
    assert len(ours) == 4
    assert {line["request_id"] for line in ours} == {"id-7"}
    assert "secret diary" not in str(written)


def test_the_engine_learns_the_requests_id_for_its_own_lines(harness: Harness) -> None:
    harness.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": "id-7"})

    assert [request.exchange_id for request in harness.engine.requests] == ["id-7"]
