"""Ids of requests, and the headers that every reply carries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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
