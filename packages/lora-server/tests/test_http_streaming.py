"""Streams: their head, their errors, and clients that leave."""

from __future__ import annotations

import asyncio
import logging
from functools import reduce
from typing import TYPE_CHECKING, Any

import pytest

from lora_server.engine.messages import FinishReason, RequestFailed, merge_tokens
from lora_server.errors import NotReadyError
from lora_server.http.streaming import ClientGoneError, while_connected

if TYPE_CHECKING:
    from conftest import Harness

BODIES = {
    "/v1/completions": {"prompt": ["a", "b"], "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "n": 2},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_a_stream_ends_the_engines_work(harness: Harness, path: str) -> None:
    harness.says("hello", finish=None)

    sent = harness.leave(path, BODIES[path] | {"model": "sql", "stream": True}, after_chunks=3)

    assert sent[0]["type"] == "http.response.start"
    assert harness.engine.requests
    assert sorted(harness.engine.ended) == sorted(r.request_id for r in harness.engine.requests)
    assert harness.catalog.held == []


@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_before_a_whole_reply_ends_the_engines_work(
    harness: Harness, path: str
) -> None:
    harness.says("hello", finish=None)

    harness.leave(path, BODIES[path] | {"model": "sql"})

    assert harness.engine.requests
    assert sorted(harness.engine.ended) == sorted(r.request_id for r in harness.engine.requests)
    assert harness.catalog.held == []


def told(choices: list[dict[str, Any]]) -> tuple[str, list[Any], list[Any]]:
    """Join what the chunks of a stream say: text, reported tokens, reasons to end."""
    texts = [c["text"] if "text" in c else c["delta"].get("content", "") for c in choices]
    logprobs = [c["logprobs"] for c in choices if c["logprobs"] is not None]
    tokens: list[Any] = []
    for one in logprobs:
        lists = [one[name] for name in ("tokens", "token_logprobs", "text_offset") if name in one]
        tokens += zip(*lists, strict=True) if lists else one["content"]
    return "".join(texts), tokens, [c["finish_reason"] for c in choices if c["finish_reason"]]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a", "logprobs": 1}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2},
        ),
    ],
)
def test_tokens_that_come_together_are_one_event_which_lists_each(
    harness: Harness, path: str, fields: dict[str, Any]
) -> None:
    body = fields | {"stream": True, "stream_options": {"include_usage": True}}
    harness.says("hello zq 77")
    *each, usage = harness.events(harness.post(path, body))
    script = harness.engine.script
    harness.engine.script = lambda request: [reduce(merge_tokens, script(request))]  # type: ignore[arg-type]

    *together, usage_together = harness.events(harness.post(path, body))

    wanted = told([chunk["choices"][0] for chunk in each])
    assert told([chunk["choices"][0] for chunk in together]) == wanted
    assert wanted[0] == "hello zq 77"
    assert len(wanted[1]) == usage["usage"]["completion_tokens"] > 3
    assert len(each) - len(together) == len(wanted[1]) - 1
    assert usage_together["usage"] == usage["usage"]


def test_the_version_is_held_while_the_engine_works(harness: Harness) -> None:
    held: list[str] = []
    harness.says("hello")
    script = harness.engine.script

    def note(request: Any) -> Any:
        held.extend(harness.catalog.held)
        return script(request)

    harness.engine.script = note
    harness.post("/v1/completions", {"model": "sql", "prompt": "x", "stream": True})

    assert held == [harness.catalog.by_name["sql"].digest]
    assert harness.catalog.held == []


def test_the_head_is_sent_before_the_first_token(harness: Harness) -> None:
    harness.engine.script = lambda _: []

    sent = harness.leave("/v1/completions", {"prompt": "x", "stream": True})

    assert sent[0]["status"] == 200
    headers = dict(sent[0]["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"x-lora-adapter"] == b"base"
    assert b"content-length" not in headers


def test_a_failure_after_the_start_is_an_event_and_the_stream_ends(harness: Harness) -> None:
    harness.engine.script = lambda request: [
        *harness.spell(request, 0, "hello", finish=None),
        RequestFailed(request_id=request.request_id, error=NotReadyError("draining")),
    ]

    response = harness.post("/v1/completions", {"prompt": "x", "stream": True})

    *chunks, failure = harness.events(response)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["hello"]
    assert failure["error"] == {
        "message": "draining",
        "type": "server_error",
        "param": None,
        "code": "not_ready",
    }


def test_an_unexpected_failure_is_logged_and_tells_no_inner_details(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.engine.script = lambda _: [RuntimeError("secret path")]

    with caplog.at_level(logging.ERROR):
        response = harness.post(
            "/v1/completions", {"prompt": "x", "stream": True}, headers={"X-Request-Id": "id-7"}
        )

    (failure,) = harness.events(response)
    assert failure["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert "id-7" in caplog.text
    assert "secret path" in caplog.text


def test_an_aborted_stream_gets_its_end(harness: Harness) -> None:
    harness.says("hello", finish=FinishReason.ABORT)

    events = harness.events(harness.post("/v1/completions", {"prompt": "x", "stream": True}))

    assert events[-1]["choices"][0]["finish_reason"] == "abort"


def test_work_is_over_when_the_clients_leaving_is_reported() -> None:
    ended: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGoneError):
        asyncio.run(while_connected(receive, work()))
    assert ended == [True]


def test_the_result_of_work_is_returned_and_its_error_raised() -> None:
    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    async def fail() -> int:
        raise LookupError

    async def succeed() -> int:
        return 5

    assert asyncio.run(while_connected(receive, succeed())) == 5
    with pytest.raises(LookupError):
        asyncio.run(while_connected(receive, fail()))
