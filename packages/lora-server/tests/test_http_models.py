"""`GET /v1/models`: what may be asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Harness

BASE = {
    "id": "base-model",
    "object": "model",
    "created": 1_600_000_000,
    "owned_by": "lora-server",
    "root": "/models/base",
    "parent": None,
    "max_model_len": 64,
}
SQL = {
    "id": "sql",
    "object": "model",
    "created": 1_700_000_000,
    "owned_by": "lora-server",
    "root": "/adapters/x",
    "parent": "base-model",
    "max_model_len": 64,
    "lora": {
        "digest": "73716c".ljust(64, "0"),
        "rank": 8,
        "residency": "host",
        "pinned": False,
        "bytes": 1024,
        "hits": 0,
        "waiting": 0,
        "running": 0,
        "effect": None,
    },
}


def test_the_base_comes_first_under_all_its_names_then_the_adapters(harness: Harness) -> None:
    body = harness.get("/v1/models").json()

    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["base-model", "alias", "sql", "Legal"]
    assert body["data"][0] == BASE
    assert body["data"][2] == SQL


def test_one_model_is_described_by_name(harness: Harness) -> None:
    assert harness.get("/v1/models/base-model").json() == BASE
    assert harness.get("/v1/models/sql").json() == SQL


def test_names_may_hold_slashes(harness: Harness) -> None:
    harness.catalog.by_name["team/sql"] = harness.catalog.by_name["sql"]

    assert harness.get("/v1/models/team/sql").json() == SQL
    assert harness.get("/v1/models/team%2Fsql").json() == SQL


def test_an_unknown_model_is_not_found(harness: Harness) -> None:
    response = harness.get("/v1/models/a-typo")

    assert (response.status_code, harness.error(response)["code"]) == (404, "model_not_found")
