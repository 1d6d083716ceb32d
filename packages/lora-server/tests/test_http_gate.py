"""The gate of an update: where its baseline comes from, what it asks, what it answers."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from lora_server.engine.messages import (
    FinishReason,
    RequestFailed,
    SequenceOutput,
    TokenLogprob,
)
from lora_server.errors import EngineError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import httpx
    from conftest import Harness

NEW = "f" * 64
OLD = b"sql".hex().ljust(64, "0")
"""The digest that the catalog of `conftest.py` gives to `sql`."""


def baseline_of(harness: Harness, text: str, **changes: Any) -> dict[str, Any]:
    """Record what the scripted engine says when it says `text`."""
    tokens = []
    for position, id_ in enumerate(harness.ids(text)):
        logprob = -0.5 - position
        word = harness.service.text.token_text(id_)
        tokens.append({"text": word, "id": id_, "logprob": logprob, "top": {word: logprob}})
    prompt = {"prompt": "the cat", "text": text, "tokens": tokens}
    model = {"answered_by": f"sql@{OLD[:12]}", "prompts": [prompt]}
    return {"max_tokens": 8, "models": {"sql": model, "base-model": model}, **changes}


def update(harness: Harness, gate: Any = None, **fields: Any) -> httpx.Response:
    body = {"lora_name": "sql", "lora_path": "/b", "load_inplace": True, "expected_digest": NEW}
    body |= {} if gate is None else {"gate": gate}
    return harness.post("/v1/load_lora_adapter", body | fields)


def serving(harness: Harness) -> str:
    return harness.catalog.by_name["sql"].digest


def test_a_version_that_answers_as_recorded_takes_the_name(harness: Harness) -> None:
    response = update(harness, baseline_of(harness, "hello world"))

    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["lora"]["digest"] == serving(harness) == NEW
    assert answer["gate"]["passed"] is True
    assert answer["gate"]["digest_recorded"] == OLD[:12]
    assert answer["gate"]["digest_found"] == NEW
    (request,) = harness.engine.requests
    assert [use.digest for use in request.adapters] == [NEW]
    assert request.prompt_token_ids == harness.ids("the cat")
    assert request.sampling.is_greedy
    assert (request.sampling.max_tokens, request.sampling.logprobs) == (8, 5)
    assert harness.engine.ended == [request.request_id]


def test_a_version_that_moved_is_refused_with_prompt_and_token(harness: Harness) -> None:
    response = update(harness, baseline_of(harness, "hello hat"))

    error = harness.error(response)
    assert (response.status_code, error["code"], error["param"]) == (409, "gate_failed", "gate")
    assert serving(harness) == OLD
    assert OLD[:12] in error["message"]
    (sentence,) = error["details"]
    assert sentence.startswith("prompt 1 'the cat': moved at token ")
    assert "recorded ' " in sentence or "recorded '" in sentence


def test_moves_may_be_allowed_while_expectations_hold(harness: Harness) -> None:
    gate = baseline_of(harness, "hello hat", rules={"max_moved_prompts": 1})
    passed = update(harness, gate)
    gate["models"]["sql"]["prompts"][0] |= {"must_contain": ["hat"], "must_not_contain": ["wor"]}
    refused = update(harness, gate)

    assert passed.status_code == 200
    details = harness.error(refused)["details"]
    assert any("the answer lacks 'hat'" in text for text in details)
    assert any("the answer holds 'wor'" in text for text in details)


def test_the_servers_own_file_decides_unless_the_caller_says_no(
    make_harness: Callable[..., Harness], tmp_path: Path
) -> None:
    path = tmp_path / "gate.json"
    harness = make_harness(gate_file=path)
    harness.says("hello world")
    path.write_text(json.dumps(baseline_of(harness, "hello hat")))

    by_default, when_asked = update(harness), update(harness, True)
    other = update(harness, lora_name="Legal")
    asked_other = update(harness, True, lora_name="Legal")
    skipped = update(harness, False)

    assert (by_default.status_code, when_asked.status_code) == (409, 409)
    assert (other.status_code, "gate" in other.json()) == (200, False)
    assert "nothing is recorded for 'Legal'" in harness.error(asked_other)["message"]
    assert skipped.status_code == 200


def test_the_servers_file_is_read_at_each_update_and_nothing_passes_without_it(
    make_harness: Callable[..., Harness], tmp_path: Path
) -> None:
    path = tmp_path / "gate.json"
    harness = make_harness(gate_file=path)
    harness.says("hello world")

    refused = update(harness)
    path.write_text(json.dumps(baseline_of(harness, "hello world")))
    passed = update(harness)

    error = harness.error(refused)
    assert (refused.status_code, error["code"]) == (409, "gate_failed")
    assert "No such file" in error["details"][0]
    assert passed.status_code == 200


@pytest.mark.parametrize(
    ("gate", "fields", "words"),
    [
        (True, {}, "without --gate"),
        ("/etc/passwd", {}, "gate"),
        ({"max_tokens": 8}, {}, "gate.models"),
        ({"max_tokens": 8, "models": {}, "path": "/etc/passwd"}, {}, "gate.path: there is no such"),
        (True, {"load_inplace": False, "lora_name": "new"}, "only with load_inplace"),
    ],
)
def test_what_is_no_gate_is_refused_before_anything_is_loaded(
    harness: Harness, gate: Any, fields: dict[str, Any], words: str
) -> None:
    response = update(harness, gate, **fields)

    assert response.status_code == 400
    assert words in harness.error(response)["message"]
    assert serving(harness) == OLD
    assert harness.engine.requests == []


def test_a_prompt_that_does_not_fit_the_model_is_the_callers_mistake(harness: Harness) -> None:
    gate = baseline_of(harness, "hello world")
    too_long = update(harness, {**gate, "max_tokens": 1000})
    gate["models"]["sql"]["prompts"].append({"prompt": [100000], "tokens": []})
    unknown = update(harness, gate)

    assert (too_long.status_code, unknown.status_code) == (400, 400)
    assert "gate: prompt 1: the prompt has" in harness.error(too_long)["message"]
    assert "gate: prompt 2: prompt: there is no token 100000" in harness.error(unknown)["message"]
    assert harness.engine.requests == []


def test_a_version_that_cannot_answer_does_not_pass(harness: Harness) -> None:
    gate = baseline_of(harness, "hello world", rules={"max_moved_prompts": 5})
    harness.engine.script = lambda request: [
        RequestFailed(request_id=request.request_id, error=EngineError("the step failed"))
    ]
    broken = update(harness, gate)
    harness.engine.script = lambda request: [
        SequenceOutput(
            request_id=request.request_id,
            index=0,
            token_ids=(300,),
            logprobs=(TokenLogprob(300, math.nan, 1),),
            finish_reason=FinishReason.LENGTH,
        )
    ]
    not_a_number = update(harness, gate)

    assert (broken.status_code, not_a_number.status_code) == (409, 409)
    assert "the step failed" in harness.error(broken)["details"][0]
    assert "NaN" in harness.error(not_a_number)["details"][0]
    assert serving(harness) == OLD


def test_a_version_that_finds_no_slot_is_told_as_requests_are(harness: Harness) -> None:
    harness.engine.script = lambda request: [
        RequestFailed(request_id=request.request_id, error=InvalidRequestError("no slot"))
    ]

    response = update(harness, baseline_of(harness, "hello world"))

    assert (response.status_code, harness.error(response)["message"]) == (400, "no slot")


def test_a_shutdown_during_the_gate_is_not_taken_for_an_answer(harness: Harness) -> None:
    harness.engine.script = lambda request: harness.spell(
        request, 0, "x", finish=FinishReason.ABORT
    )

    response = update(harness, baseline_of(harness, "hello world"))

    assert response.status_code == 503
    assert serving(harness) == OLD


def test_a_model_that_does_not_generate_takes_no_gate(
    make_harness: Callable[..., Harness], harness: Harness
) -> None:
    pooling = make_harness(pooling=object())

    response = update(pooling, baseline_of(harness, "hello world"))

    assert response.status_code == 400
    assert "does not generate" in harness.error(response)["message"]
    assert serving(pooling) == OLD
