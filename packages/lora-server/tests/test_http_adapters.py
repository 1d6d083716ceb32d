"""Loading, unloading, pinning and describing adapters over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lora_server.errors import InvalidAdapterRequestError
from lora_server.http.service import Phase

if TYPE_CHECKING:
    from conftest import Harness


def test_load_answers_with_the_card_that_models_lists(harness: Harness) -> None:
    body = {"lora_name": "new", "lora_path": "/a/new", "pinned": True, "is_3d_lora_weight": True}

    response = harness.post("/v1/load_lora_adapter", body)

    card = response.json()
    assert response.status_code == 200
    assert (card["id"], card["root"], card["lora"]["pinned"]) == ("new", "/a/new", True)
    assert harness.get("/v1/models").json()["data"][-1] == card


def test_a_known_name_is_replaced_only_when_asked(harness: Harness) -> None:
    body = {"lora_name": "sql", "lora_path": "/b"}

    refused = harness.post("/v1/load_lora_adapter", body)
    replaced = harness.post(
        "/v1/load_lora_adapter", body | {"load_inplace": True, "expected_digest": "d" * 64}
    )

    assert harness.error(refused)["code"] == "adapter_already_loaded"
    assert (refused.status_code, replaced.status_code) == (400, 200)
    assert replaced.json()["lora"]["digest"] == "d" * 64


def test_all_reasons_against_an_adapter_are_details(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(**_: Any) -> None:
        raise InvalidAdapterRequestError("adapter 'x': 2 problems", details=("rank", "shape"))

    monkeypatch.setattr(harness.catalog, "load", refuse)

    response = harness.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"})

    assert response.status_code == 400
    assert harness.error(response)["details"] == ["rank", "shape"]


def test_unload_forgets_the_name(harness: Harness) -> None:
    response = harness.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
    after = harness.post("/v1/completions", {"model": "sql", "prompt": "x"})

    assert response.json() == {"id": "sql", "object": "model", "deleted": True}
    assert after.status_code == 404


def test_pin_and_unpin_answer_with_the_card(harness: Harness) -> None:
    harness.catalog.by_name["team/sql"] = harness.catalog.by_name["sql"]

    pinned = harness.post("/v1/adapters/team/sql/pin").json()
    unpinned = harness.post("/v1/adapters/team/sql/unpin").json()

    assert (pinned["lora"]["pinned"], unpinned["lora"]["pinned"]) == (True, False)


def test_adapters_are_listed_and_described(harness: Harness) -> None:
    listed = harness.get("/v1/adapters").json()

    assert [card["id"] for card in listed["data"]] == ["sql", "Legal"]
    assert harness.get("/v1/adapters/sql").json() == listed["data"][0]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "nobody"}),
        ("POST", "/v1/adapters/nobody/pin", None),
        ("POST", "/v1/adapters/nobody/unpin", None),
        ("GET", "/v1/adapters/nobody", None),
    ],
)
def test_an_unknown_adapter_is_not_found(
    harness: Harness, method: str, path: str, body: Any
) -> None:
    response = harness.request(method, path, json=body)

    assert (response.status_code, harness.error(response)["code"]) == (404, "adapter_not_found")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/load_lora_adapter", {}, "lora_name"),
        ("/v1/load_lora_adapter", {"lora_name": "a"}, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_name": "", "lora_path": "/a"}, "lora_name"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": ""}, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": 5}, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a", "rank": 4}, "rank"),
        ("/v1/unload_lora_adapter", {}, "lora_name"),
        ("/v1/unload_lora_adapter", {"lora_name": ""}, "lora_name"),
    ],
)
def test_missing_and_empty_fields_are_named(
    harness: Harness, path: str, body: Any, param: str
) -> None:
    response = harness.post(path, body)

    assert (response.status_code, harness.error(response)["param"]) == (400, param)


def test_nothing_is_loaded_while_draining(harness: Harness) -> None:
    harness.service.readiness.phase = Phase.DRAINING

    response = harness.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"})

    assert response.status_code == 503
