"""Keys: what each route asks for, and what opens it."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

import pytest
from fastapi.routing import APIRoute

from lora_server.errors import AuthenticationError
from lora_server.http.auth import Access, ApiKeys, GuardedRoute

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx
    from conftest import Harness

LEVELS = {
    ("GET", "/health"): Access.OPEN,
    ("GET", "/version"): Access.USER,
    ("GET", "/metrics"): Access.OVERVIEW,
    ("GET", "/openapi.json"): Access.USER,
    ("GET", "/ui"): Access.OPEN,
    ("GET", "/ui/"): Access.OPEN,
    ("GET", "/ui/{name}"): Access.OPEN,
    ("GET", "/v1/models"): Access.USER,
    ("GET", "/v1/models/{name:path}"): Access.USER,
    ("GET", "/v1/adapters"): Access.USER,
    ("GET", "/v1/adapters/{name:path}"): Access.USER,
    ("GET", "/v1/memory"): Access.OVERVIEW,
    ("POST", "/v1/completions"): Access.USER,
    ("POST", "/v1/chat/completions"): Access.USER,
    ("POST", "/v1/embeddings"): Access.USER,
    ("POST", "/pooling"): Access.USER,
    ("POST", "/classify"): Access.USER,
    ("POST", "/score"): Access.USER,
    ("POST", "/v1/score"): Access.USER,
    ("POST", "/rerank"): Access.USER,
    ("POST", "/v1/rerank"): Access.USER,
    ("POST", "/v2/rerank"): Access.USER,
    ("POST", "/v1/load_lora_adapter"): Access.ADMIN,
    ("POST", "/v1/unload_lora_adapter"): Access.ADMIN,
    ("POST", "/v1/adapters/{name:path}/pin"): Access.ADMIN,
    ("POST", "/v1/adapters/{name:path}/unpin"): Access.ADMIN,
}


def routes_of(harness: Harness) -> dict[tuple[str, str], APIRoute]:
    """Return every route that the app answers, also those behind its routers."""
    found: dict[tuple[str, str], APIRoute] = {}
    waiting = list(harness.app.routes)
    while waiting:
        route = waiting.pop()
        inner = getattr(route, "original_router", None)
        if inner is not None:
            waiting += inner.routes
            continue
        assert isinstance(route, APIRoute), f"{route} is not guarded"
        found |= {(method, route.path): route for method in route.methods or ()}
    return found


def call(harness: Harness, method: str, path: str, key: str | None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return harness.request(method, path.replace("{name:path}", "sql"), headers=headers)


def test_every_route_declares_its_level(make_harness: Callable[..., Harness]) -> None:
    routes = routes_of(make_harness())

    assert all(isinstance(route, GuardedRoute) for route in routes.values())
    assert {key: getattr(route, "access", None) for key, route in routes.items()} == LEVELS


@pytest.mark.parametrize(("method", "path"), LEVELS)
@pytest.mark.parametrize("key", [None, "K", "K2", "M", "wrong"])
def test_a_route_opens_to_its_own_keys_only(
    make_harness: Callable[..., Harness], method: str, path: str, key: str | None
) -> None:
    harness = make_harness(keys=ApiKeys(user=("K", "K2"), admin="M"))
    opening: dict[Access, set[str | None]] = {
        Access.OPEN: {None, "K", "K2", "M", "wrong"},
        Access.USER: {"K", "K2", "M"},
        Access.OVERVIEW: {"K", "K2", "M"},
        Access.ADMIN: {"M"},
    }
    opens = opening[LEVELS[method, path]]

    response = call(harness, method, path, key)

    # Without a body the guarded routes answer 400 to those who may use them.
    assert (response.status_code != 401) == (key in opens)
    if response.status_code == 401:
        assert harness.error(response)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("keys", "user", "admin"),
    [
        (ApiKeys(), {None, "K", "M"}, {None, "K", "M"}),
        (ApiKeys(user=("K",)), {"K"}, {"K"}),
        (ApiKeys(admin="M"), {None, "K", "M"}, {"M"}),
        (ApiKeys(user=("K",), admin="M"), {"K", "M"}, {"M"}),
    ],
    ids=["none", "user", "admin", "both"],
)
def test_which_keys_open_which_level(
    keys: ApiKeys, user: set[str | None], admin: set[str | None]
) -> None:
    def opening(access: Access) -> set[str | None]:
        return {key for key in (None, "K", "M") if opens(keys, key, access)}

    assert opening(Access.USER) == opening(Access.OVERVIEW) == user
    assert opening(Access.ADMIN) == admin
    assert opening(Access.OPEN) == {None, "K", "M"}


def opens(keys: ApiKeys, key: str | None, access: Access) -> bool:
    try:
        keys.admit(None if key is None else f"Bearer {key}", access)
    except AuthenticationError:
        return False
    return True


def test_the_answer_to_a_wrong_key_does_not_show_it(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(keys=ApiKeys(user=("secret-one",), admin="secret-two"))

    for key in ("secret-wrong", "secret-one"):
        response = call(harness, "POST", "/v1/load_lora_adapter", key)

        assert response.status_code == 401
        assert "secret" not in response.text


def test_every_key_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    real = hmac.compare_digest

    def count(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return real(one, other)

    monkeypatch.setattr("lora_server.http.keys.hmac.compare_digest", count)
    keys = ApiKeys(user=("first", "second"), admin="third")

    for token in ("first", "third", "none"):
        opens(keys, token, Access.USER)

    assert compared == [key.digest for key in keys.fixed] * 3
    assert {len(digest) for digest in compared} == {32}


def test_an_open_reply_tells_nothing_of_adapters(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(keys=ApiKeys(user=("K",)))

    for method, path in (key for key, level in LEVELS.items() if level is Access.OPEN):
        assert "sql" not in call(harness, method, path, None).text


@pytest.mark.parametrize("header", ["K", "Basic K", "Bearer", "Bearer ", "Bearer k", "Bearer KK"])
def test_a_header_of_another_form_opens_nothing(
    make_harness: Callable[..., Harness], header: str
) -> None:
    harness = make_harness(keys=ApiKeys(user=("K",)))

    response = harness.get("/v1/models", headers={"Authorization": header})

    assert response.status_code == 401


@pytest.mark.parametrize("header", ["Bearer K", "bearer K", "Bearer  K "])
def test_the_scheme_is_read_leniently(make_harness: Callable[..., Harness], header: str) -> None:
    harness = make_harness(keys=ApiKeys(user=("K",)))

    assert harness.get("/v1/models", headers={"Authorization": header}).status_code == 200


def test_the_body_of_a_caller_without_a_key_is_not_read(
    make_harness: Callable[..., Harness],
) -> None:
    harness = make_harness(keys=ApiKeys(user=("K",)))

    response = harness.request("POST", "/v1/completions", content=b"{not json")

    assert response.status_code == 401
