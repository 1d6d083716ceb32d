"""Probes, the version, and the API's own description."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lora_server.http.service import Phase

if TYPE_CHECKING:
    from conftest import Harness


@pytest.mark.parametrize(
    ("phase", "status"), [(Phase.STARTING, 503), (Phase.READY, 200), (Phase.DRAINING, 503)]
)
def test_health_follows_the_services_life(harness: Harness, phase: Phase, status: int) -> None:
    harness.service.readiness.phase = phase

    response = harness.get("/health")

    assert response.status_code == status
    assert phase.value in response.text


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
