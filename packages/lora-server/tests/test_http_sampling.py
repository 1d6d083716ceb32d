"""From the body's fields to the engine's, and the limits between them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from lora_server.engine.request import SamplingParams
from lora_server.errors import InvalidRequestError
from lora_server.http.sampling import Limits, build_sampling
from lora_server.http.schemas.openai import ChatBody, CompletionBody

LIMITS = Limits(max_model_len=64, vocab_size=100)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def completion(num_prompt_tokens: int = 10, **fields: Any) -> SamplingParams:
    body = CompletionBody(prompt="x", **fields)
    return build_sampling(body, num_prompt_tokens=num_prompt_tokens, limits=LIMITS)


def chat(num_prompt_tokens: int = 10, **fields: Any) -> SamplingParams:
    body = ChatBody.model_validate(CHAT | fields)
    return build_sampling(body, num_prompt_tokens=num_prompt_tokens, limits=LIMITS)


def test_every_field_reaches_the_engine() -> None:
    sampling = completion(
        max_tokens=5,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        repetition_penalty=1.1,
        logit_bias={"3": -100, "99": 1.5},
        seed=-5,
        stop_token_ids=[4, 5],
        ignore_eos=True,
        logprobs=3,
        echo=True,
    )

    assert sampling == SamplingParams(
        max_tokens=5,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        repetition_penalty=1.1,
        logit_bias={3: -100.0, 99: 1.5},
        seed=-5,
        stop_token_ids=frozenset({4, 5}),
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=3,
    )


def test_absent_and_null_fields_take_the_defaults() -> None:
    names = ("temperature", "top_p", "top_k", "n", "seed", "stop", "logit_bias")
    nulls: dict[str, Any] = dict.fromkeys(names)

    assert completion() == completion(**nulls) == SamplingParams(max_tokens=16)
    assert chat() == SamplingParams(max_tokens=54)


def test_minus_one_keeps_all_candidates() -> None:
    assert completion(top_k=-1).top_k == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4)],
)
def test_chat_asks_for_alternatives_with_two_fields(
    fields: dict[str, Any], expected: int | None
) -> None:
    assert chat(**fields).logprobs == expected


@pytest.mark.parametrize(
    ("num_prompt_tokens", "fields", "expected"),
    [
        (10, {}, 16),
        (60, {}, 4),
        (63, {}, 1),
        (10, {"max_tokens": 54}, 54),
        (10, {"max_completion_tokens": 3}, 3),
        (10, {"max_completion_tokens": 3, "max_tokens": 3}, 3),
        (64, {"max_tokens": 0, "echo": True}, 0),
    ],
)
def test_output_fits_beside_the_prompt(
    num_prompt_tokens: int, fields: dict[str, Any], expected: int
) -> None:
    assert completion(num_prompt_tokens, **fields).max_tokens == expected


@pytest.mark.parametrize(
    ("num_prompt_tokens", "fields", "numbers"),
    [
        (64, {}, ["64"]),
        (65, {"max_tokens": 1}, ["65", "64"]),
        (60, {"max_tokens": 5}, ["60", "5", "64"]),
        (65, {"max_tokens": 0, "echo": True}, ["65", "64"]),
    ],
)
def test_what_does_not_fit_the_context_names_the_numbers(
    num_prompt_tokens: int, fields: dict[str, Any], numbers: list[str]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(num_prompt_tokens, **fields)

    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert all(number in caught.value.message for number in numbers)


def test_a_chat_that_does_not_fit_names_its_messages() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(64)

    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"100": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"\u00b2": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"stop_token_ids": [100]}, "stop_token_ids"),
    ],
)
def test_fields_that_contradict_the_model_or_each_other_are_refused(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**fields)

    assert caught.value.param == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.0),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("logit_bias", {"1": 101}),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("max_tokens", -1),
        ("max_tokens", "16"),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", 1),
        ("stop_token_ids", [-1]),
        ("logprobs", 21),
        ("logprobs", True),
        ("stream_options", {"include_usage": True}),
        ("prompt", None),
        ("prompt", [1, "a"]),
        ("prompt", ["a", 1]),
        ("prompt", [[]]),
        ("prompt", [[1], 2]),
        ("prompt", [True]),
        ("prompt", {"a": 1}),
        ("suffix", "x"),
        ("best_of", 2),
        ("best_of", True),
        ("lora", [{"name": "a", "scale": float("nan")}]),
        ("lora", [{"name": ""}]),
        ("lora", [{"name": "a", "weight": 1}]),
        ("unheard_of", 1),
    ],
)
def test_values_out_of_range_or_of_another_type_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        CompletionBody.model_validate({"prompt": "x"} | {field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("top_logprobs", 2),
        ("messages", []),
        ("messages", [{"role": "tool", "content": "x"}]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
        ("messages", [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]),
    ],
)
def test_what_a_chat_cannot_honour_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        ChatBody.model_validate(CHAT | {field: value})


def test_fields_that_ask_for_nothing_are_taken() -> None:
    harmless = {
        "best_of": 1,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "store": False,
        "user": "u",
        "metadata": {"a": "b"},
        "audio": None,
        "unheard_of": None,
    }

    assert ChatBody.model_validate(CHAT | harmless).user == "u"
