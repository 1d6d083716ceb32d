"""`POST /v1/chat/completions` over a scripted engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lora_server.engine.messages import FinishReason

if TYPE_CHECKING:
    from conftest import Harness

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def test_the_reply_has_the_openai_shape(harness: Harness) -> None:
    harness.says("hello world", finish=FinishReason.STOP, stop_token_id=1, cached=3)

    body = harness.post(PATH, {"messages": [USER]}).json()

    assert body.pop("id").startswith("chatcmpl-")
    assert body == {
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "base-model",
        "system_fingerprint": "lora-server-9.9:base-model:base",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": 1,
            }
        ],
        "usage": {
            "prompt_tokens": 21,
            "completion_tokens": 3,
            "total_tokens": 24,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


def test_the_prompt_is_the_rendered_template(harness: Harness) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [], "refusal": None},
    ]

    harness.post(PATH, {"messages": messages})

    (request,) = harness.engine.requests
    assert request.prompt_token_ids == harness.ids(
        "<s>system\nbe brief<|end|>\n<s>user\na\nb<|end|>\n<s>assistant\n<|end|>\n<s>assistant\n"
    )
    assert request.sampling.max_tokens == 64 - len(request.prompt_token_ids)


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(harness: Harness) -> None:
    harness.says("hello world", finish=FinishReason.STOP, stop_token_id=1)
    options = {"stream": True, "stream_options": {"include_usage": True}}

    response = harness.post(PATH, {"model": "sql", "messages": [USER]} | options)

    events = harness.events(response)
    assert [event["choices"][0]["delta"] for event in events[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "hello"},
        {"content": " world"},
        {},
    ]
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons == [None, None, None, "stop"]
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert {event["model"] for event in events} == {"sql"}
    assert response.headers["x-lora-adapter"] == "sql@73716c000000"


def test_logprobs_are_objects_with_bytes(harness: Harness) -> None:
    body = {"messages": [USER], "logprobs": True, "top_logprobs": 1}

    whole = harness.post(PATH, body).json()["choices"][0]["logprobs"]
    events = harness.events(harness.post(PATH, body | {"stream": True}))

    hello = {"token": "hello", "logprob": -0.5, "bytes": list(b"hello")}
    assert whole["content"][0] == hello | {"top_logprobs": [hello]}
    assert [entry["token"] for entry in whole["content"]] == ["hello", " world"]
    chunks = [event["choices"][0]["logprobs"] for event in events[1:]]
    assert [entry for chunk in chunks for entry in chunk["content"]] == whole["content"]


def test_several_choices_stream_side_by_side(harness: Harness) -> None:
    harness.says("hello", "world")

    events = harness.events(harness.post(PATH, {"messages": [USER], "n": 2, "stream": True}))

    texts = {0: "", 1: ""}
    for event in events:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: "hello", 1: "world"}


def test_token_ids_are_returned_when_asked_for(harness: Harness) -> None:
    body = harness.post(PATH, {"messages": [USER], "return_token_ids": True}).json()

    assert body["choices"][0]["token_ids"] == list(harness.ids("hello world"))
    assert body["prompt_token_ids"] == list(harness.engine.requests[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type",
        ),
        ({"messages": [USER], "tools": [{"type": "function"}]}, "tools"),
        ({"messages": [USER], "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [USER], "n": 0}, "n"),
        ({"messages": [USER], "max_tokens": 60}, "messages"),
    ],
)
def test_mistakes_name_the_field(harness: Harness, fields: dict[str, Any], param: str) -> None:
    response = harness.post(PATH, fields)

    assert response.status_code == 400
    assert harness.error(response)["param"] == param


def test_all_mistakes_are_reported_at_once(harness: Harness) -> None:
    body = {"messages": [USER], "tools": [1], "n": 0, "temperature": "hot"}

    error = harness.error(harness.post(PATH, body))

    assert [detail.split(":")[0] for detail in error["details"]] == ["temperature", "n", "tools"]
    assert all(detail in error["message"] for detail in error["details"])


def test_without_a_template_the_route_says_what_to_use(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.tokenizer, "chat_template", None)

    response = harness.post(PATH, {"messages": [USER]})

    assert response.status_code == 400
    assert "/v1/completions" in harness.error(response)["message"]
