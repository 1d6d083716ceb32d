"""`POST /v1/completions` over a scripted engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lora_server.engine.messages import (
    FinishReason,
    PromptLogprobs,
    RequestFailed,
    SequenceOutput,
    TokenLogprob,
)
from lora_server.errors import EngineError, UnknownAdapterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Harness

    from lora_server.engine.messages import EngineOutput
    from lora_server.engine.request import GenerationRequest

PATH = "/v1/completions"


def texts_of(events: list[Any]) -> dict[int, str]:
    """Join a stream's text by choice."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def test_the_reply_has_the_openai_shape(harness: Harness) -> None:
    response = harness.post(PATH, {"model": "sql", "prompt": "the cat"})

    body = response.json()
    assert body.pop("id").startswith("cmpl-")
    assert response.headers["x-lora-adapter"] == "sql@73716c000000"
    assert body == {
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "sql",
        "system_fingerprint": "lora-server-9.9:base-model:sql@73716c000000",
        "choices": [
            {
                "index": 0,
                "text": "hello world",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 2,
            "total_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_the_engine_gets_tokens_and_digest(harness: Harness) -> None:
    harness.post(PATH, {"model": "sql", "prompt": "the cat", "n": 2, "seed": 7})

    (request,) = harness.engine.requests
    assert request.prompt_token_ids == harness.ids("the cat")
    assert [use.digest for use in request.adapters] == [harness.catalog.by_name["sql"].digest]
    assert (request.n, request.sampling.seed, request.sampling.max_tokens) == (2, 7, 16)


@pytest.mark.parametrize("stream", [False, True])
def test_every_prompt_has_its_own_choices(harness: Harness, *, stream: bool) -> None:
    harness.engine.script = lambda request: [
        output
        for i in range(2)
        for output in harness.spell(request, i, f"{len(request.prompt_token_ids)}{i}")
    ]

    response = harness.post(PATH, {"prompt": ["the", "the cat"], "n": 2, "stream": stream})

    events = harness.events(response) if stream else [response.json()]
    assert texts_of(events) == {0: "10", 1: "11", 2: "20", 3: "21"}


def test_prompts_may_be_token_ids_or_lists_of_them(harness: Harness) -> None:
    harness.post(PATH, {"prompt": [5, 6, 7]})
    response = harness.post(PATH, {"prompt": [[5], [6, 7]]})

    sent = [request.prompt_token_ids for request in harness.engine.requests]
    assert sent == [(5, 6, 7), (5,), (6, 7)]
    assert response.json()["usage"]["prompt_tokens"] == 3


def test_a_stream_equals_the_whole_reply(harness: Harness) -> None:
    harness.says("hello 😀 world", "the cat")
    body = {"prompt": "x", "n": 2, "logprobs": 1}

    whole = harness.post(PATH, body).json()
    events = harness.events(harness.post(PATH, body | {"stream": True}))

    for choice in whole["choices"]:
        chunks = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
        assert [chunk["finish_reason"] for chunk in chunks][-1] == "length"
        assert {chunk["finish_reason"] for chunk in chunks[:-1]} == {None}
        for name, values in choice["logprobs"].items():
            assert [item for chunk in chunks for item in chunk["logprobs"][name]] == values


def test_chunks_repeat_the_head_and_carry_usage_when_asked(harness: Harness) -> None:
    body = {"model": "sql", "prompt": "x", "stream": True}

    plain = harness.events(harness.post(PATH, body))
    counted = harness.events(harness.post(PATH, body | {"stream_options": {"include_usage": True}}))

    assert {event["system_fingerprint"] for event in plain} == {
        "lora-server-9.9:base-model:sql@73716c000000"
    }
    assert len({event["id"] for event in plain}) == 1
    assert all("usage" not in event for event in plain)
    assert [event["usage"] for event in counted[:-1]] == [None] * (len(counted) - 1)
    assert counted[-1]["choices"] == []
    assert counted[-1]["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stop", ["o w", ["zzz", "o w"]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_text_and_ends_the_engines_work(
    harness: Harness, *, stop: Any, stream: bool
) -> None:
    harness.says("hello world, the cat sat", finish=None)

    response = harness.post(PATH, {"prompt": "x", "stop": stop, "stream": stream})

    events = harness.events(response) if stream else [response.json()]
    last = events[-1]["choices"][0]
    assert texts_of(events) == {0: "hell"}
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "o w")
    assert harness.engine.ended == [harness.engine.requests[0].request_id]
    assert harness.engine.num_sent == 2


def test_a_stopped_choice_does_not_end_the_others(harness: Harness) -> None:
    def script(request: GenerationRequest) -> list[SequenceOutput]:
        stopped = harness.spell(request, 0, "the cat sat on the mat", finish=None)
        other = harness.spell(request, 1, "hello world, the mat")
        return [output for pair in zip(stopped, other, strict=False) for output in pair] + other[6:]

    harness.engine.script = script

    body = harness.post(PATH, {"prompt": "x", "n": 2, "stop": " cat"}).json()

    assert [choice["text"] for choice in body["choices"]] == ["the", "hello world, the mat"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    num_other = len(harness.ids("hello world, the mat"))
    assert body["usage"]["completion_tokens"] == 2 + num_other


def test_cached_tokens_are_counted_once_a_prompt(harness: Harness) -> None:
    harness.says("hello world", cached=1)

    usage = harness.post(PATH, {"prompt": ["the cat", "the mat"], "n": 3}).json()["usage"]

    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def scored(harness: Harness, request: GenerationRequest, text: str) -> list[EngineOutput]:
    prompt = tuple(
        TokenLogprob(id_, -float(i), 1) for i, id_ in enumerate(request.prompt_token_ids[1:], 1)
    )
    first: list[EngineOutput] = [PromptLogprobs(request_id=request.request_id, logprobs=prompt)]
    return first + [output for i in range(request.n) for output in harness.spell(request, i, text)]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_prompt_with_its_logprobs(harness: Harness, *, stream: bool) -> None:
    harness.engine.script = lambda request: scored(harness, request, " sat")
    body = {"prompt": "the cat", "echo": True, "logprobs": 0, "n": 2, "stream": stream}

    response = harness.post(PATH, body)

    events = harness.events(response) if stream else [response.json()]
    first = next(e["choices"] for e in events)[0]
    assert texts_of(events) == {0: "the cat sat", 1: "the cat sat"}
    assert harness.engine.requests[0].sampling.prompt_logprobs == 0
    assert first["logprobs"] == {
        "tokens": ["the", " cat", " sat"],
        "token_logprobs": [None, -1.0, -0.5],
        "top_logprobs": [None, {" cat": -1.0}, {" sat": -0.5}],
        "text_offset": [0, 3, 7],
    }


def test_a_prompt_may_be_scored_without_output(harness: Harness) -> None:
    def script(request: GenerationRequest) -> list[EngineOutput]:
        end = SequenceOutput(
            request_id=request.request_id,
            index=0,
            token_ids=(),
            finish_reason=FinishReason.LENGTH,
        )
        return [scored(harness, request, "x")[0], end]

    harness.engine.script = script

    body = {"prompt": "the cat", "echo": True, "logprobs": 1, "max_tokens": 0}
    choice = harness.post(PATH, body).json()["choices"][0]

    assert (choice["text"], choice["finish_reason"]) == ("the cat", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0]


def test_echo_of_token_ids_is_their_text(harness: Harness) -> None:
    body = {"prompt": [0, *harness.ids("the cat")], "echo": True}

    assert harness.post(PATH, body).json()["choices"][0]["text"] == "the cathello world"


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_when_asked_for(harness: Harness, *, stream: bool) -> None:
    body = {"prompt": "the cat", "return_token_ids": True, "stream": stream}

    response = harness.post(PATH, body)

    events = harness.events(response) if stream else [response.json()]
    choices = [event["choices"][0] for event in events]
    assert [id_ for c in choices for id_ in c["token_ids"]] == list(harness.ids("hello world"))
    assert choices[0]["prompt_token_ids"] == list(harness.ids("the cat"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [400]}, "prompt"),
        ({"prompt": [[1], [400]]}, "prompt"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": ["a", 1]}, "prompt.1"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "lora": [{"name": "sql", "scale": "x"}]}, "lora.0.scale"),
        ({"prompt": "a", "stop": [""]}, "stop.0"),
        ({"prompt": "a", "guided_json": {}}, "guided_json"),
    ],
)
def test_mistakes_name_the_field(harness: Harness, fields: dict[str, Any], param: str) -> None:
    response = harness.post(PATH, fields)

    assert response.status_code == 400
    assert harness.error(response)["param"] == param
    assert harness.engine.requests == []


def test_a_prompt_beyond_the_context_names_both_numbers(harness: Harness) -> None:
    response = harness.post(PATH, {"prompt": [5] * 70})

    error = harness.error(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "70" in error["message"]
    assert "64" in error["message"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineError("the step failed"), 500, "internal_error"),
        (UnknownAdapterError("adapter 'sql' is gone"), 404, "adapter_not_found"),
    ],
)
def test_an_engines_failure_answers_and_ends_the_other_prompts(
    harness: Harness, error: Exception, status: int, code: str
) -> None:
    def script(request: GenerationRequest) -> list[EngineOutput]:
        if request.request_id.endswith("-1"):
            return [RequestFailed(request_id=request.request_id, error=error)]
        return []

    harness.engine.script = script

    response = harness.post(PATH, {"model": "sql", "prompt": ["a", "b", "c"]})

    assert response.status_code == status
    assert harness.error(response)["code"] == code
    assert response.headers["x-lora-adapter"] == "sql@73716c000000"
    assert sorted(harness.engine.ended) == sorted(r.request_id for r in harness.engine.requests)


def test_an_engine_that_ends_early_is_an_error(harness: Harness) -> None:
    def cut(request: GenerationRequest) -> list[EngineOutput]:
        outputs = harness.spell(request, 0, "hello", finish=FinishReason.LENGTH)
        return [*outputs, *harness.spell(request, 0, "hello", finish=FinishReason.LENGTH)]

    harness.engine.script = cut

    response = harness.post(PATH, {"prompt": "x", "n": 2})

    assert response.status_code == 500
    assert "before its last token" in harness.error(response)["message"]


def test_a_long_prompt_is_tokenised_beside_the_loop(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(max_model_len=100_000)
    harness.says("hello")
    text = "hello world, " * 1000

    usage = harness.post(PATH, {"prompt": text}).json()["usage"]

    assert usage["prompt_tokens"] == len(harness.ids(text))
