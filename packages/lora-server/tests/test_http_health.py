"""Probes, the version, and the API's own description."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lora_server.http.service import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from conftest import Harness

    from lora_server.engine.messages import EngineOutput
    from lora_server.engine.request import GenerationRequest


@pytest.mark.parametrize(
    ("phase", "status"), [(Phase.STARTING, 503), (Phase.READY, 200), (Phase.DRAINING, 503)]
)
def test_health_follows_the_services_life(harness: Harness, phase: Phase, status: int) -> None:
    harness.service.readiness.phase = phase

    response = harness.get("/health")

    assert response.status_code == status
    assert phase.value in response.text


@pytest.mark.parametrize("phase", list(Phase))
def test_a_process_that_starts_or_drains_is_alive(harness: Harness, phase: Phase) -> None:
    harness.service.readiness.phase = phase

    response = harness.get("/health?live=true")

    assert response.status_code == 200
    assert response.json() == {"status": phase.value}


@pytest.mark.parametrize("path", ["/health", "/health?live=true"])
def test_a_process_without_its_engine_is_neither_ready_nor_alive(
    make_harness: Callable[..., Harness], path: str
) -> None:
    harness = make_harness(is_alive=lambda: False)

    assert harness.get(path).status_code == 503


@pytest.mark.parametrize("path", ["/health", "/v1/completions", "/v1/load_lora_adapter"])
def test_a_refusal_while_draining_says_when_to_ask_again(harness: Harness, path: str) -> None:
    harness.service.readiness.phase = Phase.DRAINING
    content = {"prompt": "x"} if "completions" in path else {"lora_name": "a", "lora_path": "/a"}

    response = harness.get(path) if path == "/health" else harness.post(path, content)

    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert "draining" in harness.error(response)["message"]


def test_a_request_counts_as_running_until_its_reply_is_complete(harness: Harness) -> None:
    readiness = harness.service.readiness
    seen: list[int] = []
    answer = harness.engine.script

    def script(request: GenerationRequest) -> Sequence[EngineOutput | Exception]:
        seen.append(readiness.num_running)
        readiness.phase = Phase.DRAINING  # what runs is not disturbed by it
        return answer(request)

    harness.engine.script = script

    reply = harness.post("/v1/completions", {"prompt": "x"})

    assert (reply.status_code, seen, readiness.num_running) == (200, [1], 0)


def test_a_client_that_left_does_not_count_as_running(harness: Harness) -> None:
    harness.says("hello", finish=None)

    harness.leave("/v1/completions", {"prompt": "x", "stream": True}, after_chunks=1)

    assert harness.service.readiness.num_running == 0


def test_version(harness: Harness) -> None:
    assert harness.get("/version").json() == {"version": "9.9"}


def test_metrics_count_what_was_served(harness: Harness) -> None:
    harness.post("/v1/completions", {"model": "sql", "prompt": "the cat"})

    response = harness.get("/metrics")

    assert response.headers["content-type"].startswith("text/plain")
    assert 'lora_server_requests_total{adapter="sql",outcome="ok"} 1.0' in response.text
    assert 'lora_server_generation_tokens_total{adapter="sql"} 2.0' in response.text


def test_the_description_lists_the_routes(harness: Harness) -> None:
    paths = harness.get("/openapi.json").json()["paths"]

    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"} <= paths.keys()
