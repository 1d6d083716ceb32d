"""Every error of the package, and every mistake of a caller's, in the one shape."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from lora_server import errors
from lora_server.engine.messages import RequestFailed
from lora_server.http.errors import error_body, status_of
from lora_server.http.service import Phase

if TYPE_CHECKING:
    from conftest import Harness

JSON = {"Content-Type": "application/json"}
STATUSES = {
    errors.InvalidRequestError("m", param="p"): (400, "invalid_request"),
    errors.InvalidAdapterRequestError("m", details=("a", "b")): (400, "invalid_adapter"),
    errors.AdapterAlreadyLoadedError("m"): (400, "adapter_already_loaded"),
    errors.AdapterConflictError("m"): (400, "adapter_conflict"),
    errors.AuthenticationError("m"): (401, "invalid_api_key"),
    errors.PathNotAllowedError("m"): (403, "path_not_allowed"),
    errors.RuntimeLoadingDisabledError("m"): (403, "runtime_loading_disabled"),
    errors.ModelNotFoundError("x", ["base"]): (404, "model_not_found"),
    errors.UnknownAdapterError("m"): (404, "adapter_not_found"),
    errors.AdapterNotLoadedError("x", ["a"]): (404, "adapter_not_found"),
    errors.NameNotAllowedError("m"): (403, "name_not_allowed"),
    errors.RequestTimeoutError("m"): (408, "request_timeout"),
    errors.RequestTooLargeError("m"): (413, "request_too_large"),
    errors.DigestMismatchError("m"): (409, "digest_mismatch"),
    errors.GateFailedError("m"): (409, "gate_failed"),
    errors.EngineError("m"): (500, "internal_error"),
    errors.NotReadyError("m"): (503, "not_ready"),
}


def leaves(kind: type[Exception]) -> set[type[Exception]]:
    below = kind.__subclasses__()
    return {kind} if not below else set().union(*map(leaves, below))


def test_every_error_of_the_package_has_a_status() -> None:
    known = {type(error) for error in STATUSES} | {errors.StartupError, errors.RateLimitError}

    assert known == leaves(errors.ServerError) | {errors.UnknownAdapterError}


@pytest.mark.parametrize(("error", "expected"), STATUSES.items(), ids=lambda v: type(v).__name__)
def test_errors_answer_with_status_and_code(
    error: errors.ServerError, expected: tuple[int, str]
) -> None:
    body = error_body(error)["error"]

    assert (status_of(error), body["code"]) == expected
    kind = "server_error" if expected[0] >= 500 else "invalid_request_error"
    assert body["type"] == kind
    assert body["param"] == getattr(error, "param", None)


def test_a_limit_is_told_as_the_openai_api_does() -> None:
    error = errors.RateLimitError("m", what="tokens", retry_after_s=1.2)

    assert status_of(error) == 429
    assert error_body(error)["error"]["type"] == "tokens"
    assert error_body(error)["error"]["code"] == "rate_limit_exceeded"


def test_lists_of_reasons_are_details() -> None:
    many = errors.InvalidAdapterRequestError("m", details=("a", "b"))

    assert error_body(many)["error"]["details"] == ["a", "b"]
    assert error_body(errors.InvalidAdapterRequestError("m"))["error"]["details"] == ["m"]
    assert "details" not in error_body(errors.InvalidRequestError("m"))["error"]


@pytest.mark.parametrize(
    ("content", "headers", "part"),
    [
        (b"", JSON, "prompt|JSON object"),
        (b"{", JSON, "not valid JSON"),
        (b'{"prompt": "x",}', JSON, "not valid JSON"),
        (b"[]", JSON, "JSON object"),
        (b'"x"', JSON, "JSON object"),
        (b"null", JSON, "JSON object"),
        (b"\xff{}", JSON, "body"),
        (b"[" * 200_000, JSON, "body"),
        (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", JSON, "body"),
        (b'{"prompt": "x", "temperature": NaN}', JSON, "temperature"),
        (b'{"prompt": "x", "temperature": 1e999}', JSON, "temperature"),
        (b'{"prompt": "\\ud800"}', JSON, "Unicode|surrogate|unicode"),
        (b'{"prompt": "x", "model": "\\ud800"}', JSON, ""),
        (b'{"prompt": "x", "\\ud800": 1}', JSON, ""),
        (b'{"prompt": "x"}', {"Content-Type": "text/plain"}, "application/json"),
        (b'{"prompt": "x"}', {}, "application/json"),
        (b"prompt=x", {"Content-Type": "application/x-www-form-urlencoded"}, "application/json"),
    ],
)
def test_a_broken_body_is_the_callers_mistake(
    harness: Harness, content: bytes, headers: dict[str, str], part: str
) -> None:
    response = harness.request("POST", "/v1/completions", content=content, headers=headers)

    assert 400 <= response.status_code < 500
    message = harness.error(response)["message"]
    assert any(word in message for word in part.split("|"))


def test_a_refusal_may_quote_what_is_no_unicode(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(**fields: str) -> None:
        raise errors.PathNotAllowedError(f"{fields['path']}\ud800 is outside")

    monkeypatch.setattr(harness.catalog, "load", refuse)

    response = harness.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"})

    assert response.status_code == 403
    assert harness.error(response)["message"] == "b\ud800 is outside"


def test_an_unknown_route_and_a_wrong_method_are_errors_in_the_same_shape(
    harness: Harness,
) -> None:
    unknown, method = harness.get("/v1/nothing"), harness.get("/v1/completions")

    assert (unknown.status_code, harness.error(unknown)["code"]) == (404, "unknown_url")
    assert (method.status_code, harness.error(method)["code"]) == (405, "method_not_allowed")
    assert method.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_not_found_before_anything_runs(
    harness: Harness, *, stream: bool
) -> None:
    body = {"model": "a-typo", "prompt": "x", "stream": stream}

    response = harness.post("/v1/completions", body)

    error = harness.error(response)
    assert (response.status_code, error["code"], error["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    assert all(name in error["message"] for name in ("base-model", "alias", "sql", "Legal"))
    assert "x-lora-adapter" not in response.headers
    assert harness.engine.requests == []


def test_a_mistake_after_the_choice_still_says_what_would_have_run(harness: Harness) -> None:
    response = harness.post("/v1/completions", {"model": "sql", "prompt": ""})

    assert response.status_code == 400
    assert response.headers["x-lora-adapter"] == "sql@73716c000000"


def test_an_unexpected_failure_is_500_with_its_request_in_the_log(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.engine.script = lambda _: [RuntimeError("secret path")]

    with caplog.at_level(logging.ERROR):
        response = harness.post(
            "/v1/completions", {"model": "sql", "prompt": "x"}, headers={"X-Request-Id": "id-7"}
        )

    assert response.status_code == 500
    assert harness.error(response)["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["x-lora-adapter"] == "sql@73716c000000"
    assert "id-7" in caplog.text


def test_a_callers_mistake_is_not_logged_as_an_error(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        harness.post("/v1/completions", {"model": "a-typo", "prompt": "x"})

    assert caplog.records == []


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.DRAINING])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_requests_are_refused_unless_ready(harness: Harness, phase: Phase, path: str) -> None:
    harness.service.readiness.phase = phase
    body: dict[str, Any] = {"prompt": "x"}
    if "chat" in path:
        body = {"messages": [{"role": "user", "content": "x"}]}

    response = harness.post(path, body)

    assert (response.status_code, harness.error(response)["code"]) == (503, "not_ready")
    assert phase.value in harness.error(response)["message"]


def test_a_failed_request_of_the_engine_keeps_the_engines_words(harness: Harness) -> None:
    harness.engine.script = lambda request: [
        RequestFailed(
            request_id=request.request_id, error=errors.EngineError("adapter 'sql': folder is gone")
        )
    ]

    response = harness.post("/v1/completions", {"model": "sql", "prompt": "x"})

    assert json.loads(response.text)["error"]["message"] == "adapter 'sql': folder is gone"
