"""Keys over HTTP: what each may use, what it never learns of, and what is written down."""

from __future__ import annotations

import hashlib
import json
import signal
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml
from support.pooling import FAMILIES, build_world
from support.requests import body, expected, refusal
from support.server import BASE_NAME, fail_to_start, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.fixture_types import StartServer
    from support.server import Server
    from support.worlds import World

TEAM: dict[str, Any] = {
    "name": "team",
    "key": "secret-team",
    "adapters": ["a00", "a1*"],
    "requests_per_minute": 1000,
    "tokens_per_minute": 100_000,
}
OPERATOR: dict[str, Any] = {
    "name": "operator",
    "key_sha256": hashlib.sha256(b"secret-operator").hexdigest(),
    "adapters": "*",
    "may_use_base": True,
    "is_admin": True,
}
TIGHT: dict[str, Any] = {
    "name": "tight",
    "key": "secret-tight",
    "adapters": "*",
    "may_use_base": True,
    "requests_per_minute": 2,
}
NAMES = ("a00", "a03", "a09", "a10")


def as_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(server: Server, key: str, model: str, **fields: Any) -> httpx.Response:
    return server.http.post("/v1/completions", json=body(model, **fields), headers=as_key(key))


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(yaml.safe_dump([TEAM, OPERATOR, TIGHT]))
    return path


@pytest.fixture(scope="module")
def server(llama: World, start_server: StartServer, key_file: Path) -> Iterator[Server]:
    flags = [*llama.lora_modules(*NAMES), "--max-loras", "4", "--max-lora-rank", "32"]
    flags += ["--adapter-root", str(llama.folder), "--api-key-file", str(key_file)]
    flags += ["--log-level", "warning"]
    with start_server(llama, *flags) as made:
        yield made


@pytest.fixture(autouse=True)
def first_keys(key_file: Path) -> Iterator[None]:
    """Put the file back as it was at start, whatever a test writes into it."""
    before = key_file.read_text()
    yield
    key_file.write_text(before)


def test_c50_nothing_but_the_probe_is_open(server: Server) -> None:
    reply = httpx.get(f"{server.url}/openapi.json", headers=as_key("secret-operator"))
    described = reply.raise_for_status().json()["paths"]
    statuses = {
        (method, path): httpx.request(method, f"{server.url}{path}").status_code
        for path, methods in described.items()
        for method in methods
    }

    assert {call for call, status in statuses.items() if status != 401} == {("get", "/health")}
    assert httpx.get(f"{server.url}/metrics", headers=as_key("secret-team")).status_code == 401
    assert httpx.get(f"{server.url}/metrics", headers=as_key("secret-operator")).status_code == 200


def test_a_key_is_answered_by_its_own_adapters(llama: World, server: Server) -> None:
    for name in ("a00", "a10"):
        reply = ask(server, "secret-team", name).raise_for_status()
        assert tuple(reply.json()["choices"][0]["token_ids"]) == expected(llama, name)

    models = server.http.get("/v1/models", headers=as_key("secret-team")).json()["data"]
    assert [card["id"] for card in models] == ["a00", "a10"]
    every = server.http.get("/v1/models", headers=as_key("secret-operator")).json()["data"]
    assert [card["id"] for card in every] == [BASE_NAME, *NAMES]


@pytest.mark.parametrize("hidden", ["a03", BASE_NAME])
def test_what_is_not_its_own_is_as_unknown_as_what_nobody_has(server: Server, hidden: str) -> None:
    def answers(name: str) -> list[tuple[int, str]]:
        http, headers = server.http, as_key("secret-team")
        replies = [
            ask(server, "secret-team", name),
            ask(server, "secret-team", name, stream=True),
            ask(server, "secret-team", "a00", lora=[{"name": name}]),
            ask(server, "secret-team", "", lora=[{"name": "a00"}, {"name": name}]),
            http.post("/v1/completions", json=body(None), headers=headers | {"X-Use-LoRA": name}),
            http.get(f"/v1/models/{name}", headers=headers),
            http.get(f"/v1/adapters/{name}", headers=headers),
        ]
        return [(reply.status_code, reply.text.replace(name, "NAME")) for reply in replies]

    unknown = answers("nothing")

    assert all(status in (400, 404) for status, _ in unknown)
    assert answers(hidden) == unknown
    assert not any("a03" in text or "a09" in text for _, text in unknown)


def test_limits_are_told_and_kept(server: Server) -> None:
    replies = [ask(server, "secret-tight", BASE_NAME) for _ in range(3)]

    assert [reply.status_code for reply in replies] == [200, 200, 429]
    refusal(replies[-1], 429, "rate_limit_exceeded")
    assert 0 < int(replies[-1].headers["retry-after"]) <= 30
    assert replies[0].headers["x-ratelimit-remaining-requests"] == "1"
    told = ask(server, "secret-team", "a00").headers
    assert told["x-ratelimit-limit-tokens"] == "100000"
    assert "x-ratelimit-remaining-tokens" in told


def test_a_new_file_is_in_force_without_a_restart(server: Server, key_file: Path) -> None:
    renewed = {**TEAM, "key": "secret-renewed", "adapters": ["a03"]}
    key_file.write_text(yaml.safe_dump([renewed, OPERATOR, TIGHT]))
    server.signal(signal.SIGHUP)

    assert server.wait_for(lambda: ask(server, "secret-renewed", "a03").status_code == 200)
    assert ask(server, "secret-renewed", "a00").status_code == 404
    assert ask(server, "secret-team", "a00").status_code == 401

    key_file.write_text(yaml.safe_dump([{**renewed, "key": "has space"}, "secret-line"]))
    server.signal(signal.SIGHUP)

    assert server.wait_for(lambda: "keys stay as they were" in server.log.read_text())
    assert ask(server, "secret-renewed", "a03").status_code == 200
    assert "secret" not in server.log.read_text().replace("secrets", "")

    key_file.write_text(yaml.safe_dump([TEAM, OPERATOR, TIGHT]))

    assert server.wait_for(lambda: ask(server, "secret-team", "a00").status_code == 200)


def test_management_calls_are_written_down_at_every_log_level(llama: World, server: Server) -> None:
    content = {"lora_name": "new", "lora_path": str(llama.adapters["a04"])}
    headers = as_key("secret-operator") | {"X-Request-Id": "call-1"}
    loaded = server.http.post("/v1/load_lora_adapter", json=content, headers=headers)
    refused = server.http.post(
        "/v1/unload_lora_adapter", json={"lora_name": "new"}, headers=as_key("secret-team")
    )
    server.http.post("/v1/unload_lora_adapter", json={"lora_name": "new"}, headers=headers)

    digest = loaded.raise_for_status().json()["lora"]["digest"]
    lines = [line for line in server.log.read_text().splitlines() if "lora_server.audit" in line]
    load, denied, unload = lines[-3:]
    assert refused.status_code == 401
    for part in ('key="operator"', f'after="{digest}"', 'client="127.0.0.1"', 'outcome="ok"'):
        assert part in load
    assert f"path={json.dumps(content['lora_path'])}" in load
    assert 'request_id="call-1"' in load
    assert 'outcome="invalid_api_key"' in denied
    assert f'before="{digest}"' in unload
    assert not any("secret" in line for line in lines)


def test_mistakes_in_the_file_are_all_told_before_the_model_is_loaded(
    llama: World, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([{"name": "a b", "adapters": "*"}, {"name": "c", "key": "secret"}]))

    arguments = ["serve", str(llama.base), "--port", "0", "--api-key-file", str(keys)]
    status, text = fail_to_start(arguments, tmp_path / "log")

    assert status not in (0, None)
    for part in ("entry 1 ('a b'): name", "entry 2 ('c'): adapters"):
        assert part in text
    assert "secret" not in text
    assert "Traceback" not in text


def test_pooling_routes_hide_the_same(tmp_path: Path) -> None:
    world = build_world(FAMILIES["bert"], tmp_path, "classify", {"mine": 2, "other": 3})
    keys = tmp_path / "keys.yaml"
    limit = {"tokens_per_minute": 60}
    keys.write_text(yaml.safe_dump([{**TEAM, "adapters": ["mine"], **limit}, OPERATOR]))
    arguments = ["serve", str(world.base), "--served-model-name", BASE_NAME, "--port", "0"]
    arguments += ["--dtype", "float32", *world.flags, "--api-key-file", str(keys)]

    with running([*arguments, "--max-lora-cls-labels", "3"], tmp_path / "log") as server:

        def classify(model: str, num_tokens: int = 20) -> httpx.Response:
            content = {"model": model, "input": list(range(20, 20 + num_tokens))}
            return server.http.post("/classify", json=content, headers=as_key("secret-team"))

        def unknown(name: str) -> tuple[int, str]:
            reply = classify(name)
            return reply.status_code, reply.text.replace(name, "NAME")

        assert unknown("other") == unknown("nothing") == unknown(BASE_NAME)
        assert unknown("other")[0] == 404
        first, second = classify("mine"), classify("mine", 50)

    assert first.headers["x-ratelimit-remaining-tokens"] == "40"
    refusal(second, 429, "rate_limit_exceeded")
