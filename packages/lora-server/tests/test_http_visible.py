"""What a key may not use does not exist for it: the same answers as for names nobody has loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lora_server.http.keys import ApiKey, ApiKeys, digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import httpx
    from conftest import Harness

SQL = ApiKey(name="sql-team", digest=digest_of("S"), adapters=("sql",), may_use_base=False)
BASE = ApiKey(name="base-team", digest=digest_of("B"), adapters=(), may_use_base=True)
GLOB = ApiKey(
    name="glob-team", digest=digest_of("G"), adapters=("s*",), may_use_base=False, is_admin=True
)
ALL = ApiKey(name="all", digest=digest_of("A"), is_admin=True)


class Keys:
    """The keys of these tests."""

    def current(self) -> tuple[ApiKey, ...]:
        return (SQL, BASE, GLOB, ALL)

    def reload(self) -> None:
        """Nothing to read."""


@pytest.fixture
def harness(make_harness: Callable[..., Harness]) -> Harness:
    harness = make_harness(keys=ApiKeys(file=Keys()))
    harness.says("hello")
    return harness


def as_key(key: str, **headers: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}", **headers}}


def ask(
    harness: Harness, key: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> httpx.Response:
    content = {"prompt": "the cat", **body}
    return harness.post("/v1/completions", content, **as_key(key, **(headers or {})))


def normal(response: httpx.Response, name: str) -> tuple[int, str, list[str]]:
    """Return an answer without the name that was asked for, and without what is always new."""
    headers = response.headers
    names = sorted(name for name in headers if name != "content-length")
    return response.status_code, response.text.replace(repr(name), "NAME"), names


@pytest.mark.parametrize(
    ("key", "ids"),
    [
        ("S", ["sql"]),
        ("B", ["base-model", "alias"]),
        ("G", ["sql"]),
        ("A", ["base-model", "alias", "sql", "Legal"]),
    ],
)
def test_the_lists_hold_what_the_key_may_use(harness: Harness, key: str, ids: list[str]) -> None:
    models = harness.get("/v1/models", **as_key(key)).json()["data"]
    adapters = harness.get("/v1/adapters", **as_key(key)).json()["data"]

    assert [card["id"] for card in models] == ids
    assert [card["id"] for card in adapters] == [i for i in ids if i in ("sql", "Legal")]


HIDDEN: list[tuple[str, str, dict[str, Any], dict[str, str]]] = [
    ("S", "Legal", {"model": "NAME"}, {}),
    ("S", "Legal", {}, {"X-Use-LoRA": "NAME"}),
    ("S", "Legal", {"model": "sql"}, {"X-Use-LoRA": "NAME"}),
    ("S", "Legal", {"lora": [{"name": "NAME"}]}, {}),
    ("S", "Legal", {"lora": [{"name": "sql"}, {"name": "NAME", "scale": 0.5}]}, {}),
    ("S", "base-model", {"model": "NAME"}, {}),
    ("S", "alias", {"model": "NAME"}, {}),
    ("B", "sql", {"model": "NAME"}, {}),
    ("B", "sql", {"lora": [{"name": "NAME"}]}, {}),
    ("G", "Legal", {"model": "NAME"}, {}),
]


@pytest.mark.parametrize(("key", "hidden", "body", "headers"), HIDDEN)
def test_a_hidden_name_is_answered_like_one_that_does_not_exist(
    harness: Harness, key: str, hidden: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    def answer(name: str) -> tuple[int, str, list[str]]:
        filled = {k: v.replace("NAME", name) for k, v in headers.items()}
        return normal(ask(harness, key, _filled(body, name), filled), name)

    status, text, _ = answer(hidden)

    assert status == 404
    assert (status, text, answer(hidden)[2]) == answer("nothing-of-this-name")
    unseen = {"S": ["Legal", "base-model", "alias"], "B": ["sql", "Legal"], "G": ["Legal"]}[key]
    assert not any(name in text for name in unseen)


def _filled(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item, name) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, name) for item in value]
    return name if value == "NAME" else value


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models/NAME"),
        ("GET", "/v1/adapters/NAME"),
        ("POST", "/v1/adapters/NAME/pin"),
        ("POST", "/v1/adapters/NAME/unpin"),
    ],
)
def test_routes_with_a_name_hide_it_too(harness: Harness, method: str, path: str) -> None:
    def answer(name: str) -> tuple[int, str, list[str]]:
        reply = harness.request(method, path.replace("NAME", name), **as_key("G"))
        return normal(reply, name)

    assert answer("Legal") == answer("nothing")
    assert answer("Legal")[0] == 404
    assert answer("sql")[0] == 200
    assert "Legal" not in answer("nothing")[1]


def test_a_limited_admin_manages_its_own_names_only(harness: Harness) -> None:
    def load(name: str, **fields: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": "/p", **fields}
        return harness.post("/v1/load_lora_adapter", body, **as_key("G"))

    def unload(name: str) -> httpx.Response:
        return harness.post("/v1/unload_lora_adapter", {"lora_name": name}, **as_key("G"))

    assert load("s-new").status_code == 200
    refused = load("Legal", load_inplace=True)
    assert (refused.status_code, harness.error(refused)["code"]) == (403, "name_not_allowed")
    assert harness.error(load("other"))["code"] == "name_not_allowed"
    assert unload("Legal").status_code == 404
    assert unload("Legal").text == unload("nothing").text.replace("nothing", "Legal")
    assert "Legal" in harness.catalog.by_name
    assert unload("s-new").status_code == 200


def test_a_key_without_the_base_is_not_answered_by_it_when_it_names_nothing(
    harness: Harness,
) -> None:
    for body, headers in (({}, {}), ({}, {"X-Use-LoRA": "base"}), ({"model": ""}, {})):
        reply = ask(harness, "S", body, headers)

        assert reply.status_code == 404
        assert harness.error(reply)["code"] == "model_not_found"
    assert harness.engine.requests == []
    assert ask(harness, "S", {"model": "sql"}).headers["x-lora-adapter"].startswith("sql@")
    assert ask(harness, "B", {}).headers["x-lora-adapter"] == "base"


def test_the_metrics_which_name_all_adapters_need_a_key_that_sees_all(harness: Harness) -> None:
    statuses = {key: harness.get("/metrics", **as_key(key)).status_code for key in "SBGA"}

    assert statuses == {"S": 401, "B": 401, "G": 401, "A": 200}


def test_what_is_unloaded_while_a_card_is_made_is_hidden_as_well(harness: Harness) -> None:
    harness.catalog.by_name.pop("sql")

    reply = harness.get("/v1/adapters/sql", **as_key("S"))

    assert reply.status_code == 404
    assert "Legal" not in reply.text
