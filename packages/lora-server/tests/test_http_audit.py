"""The audit log: each management call is one line, with who, what, and what became of it."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from lora_server.http.audit import AUDIT_LOGGER
from lora_server.http.keys import ApiKeys

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Harness

ADMIN = {"Authorization": "Bearer secret-M", "X-Request-Id": "r-1"}


@pytest.fixture
def harness(make_harness: Callable[..., Harness], caplog: pytest.LogCaptureFixture) -> Harness:
    caplog.set_level(logging.INFO, AUDIT_LOGGER)
    return make_harness(keys=ApiKeys(user=("secret-K",), admin="secret-M"))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == AUDIT_LOGGER]


def fields_of(line: str) -> dict[str, Any]:
    """Read `name=value` with values in JSON."""
    found: dict[str, Any] = {}
    decoder = json.JSONDecoder()
    while line:
        name, _, rest = line.partition("=")
        found[name], end = decoder.raw_decode(rest)
        line = rest[end:].lstrip()
    return found


def test_each_call_is_one_line(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    new, old = (name.encode().hex().ljust(64, "0") for name in ("new", "sql"))
    calls = [
        ("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "/p"}),
        ("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "/q", "load_inplace": True}),
        ("/v1/adapters/sql/pin", None),
        ("/v1/adapters/sql/unpin", None),
        ("/v1/unload_lora_adapter", {"lora_name": "new"}),
    ]

    for path, body in calls:
        assert harness.post(path, body, headers=ADMIN).status_code == 200

    records = [fields_of(line) for line in lines(caplog)]
    assert [(r["action"], r["name"], r["path"], r["before"], r["after"]) for r in records] == [
        ("POST /v1/load_lora_adapter", "new", "/p", None, new),
        ("POST /v1/load_lora_adapter", "new", "/q", new, new),
        ("POST /v1/adapters/{name:path}/pin", "sql", None, old, old),
        ("POST /v1/adapters/{name:path}/unpin", "sql", None, old, old),
        ("POST /v1/unload_lora_adapter", "new", None, new, None),
    ]
    assert {(r["outcome"], r["key"], r["request_id"]) for r in records} == {("ok", "admin", "r-1")}
    assert {r["client"] for r in records} == {"127.0.0.1"}
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("body", "key", "told"),
    [
        ({"lora_name": "sql", "lora_path": "/p"}, "secret-M", ("adapter_already_loaded", "admin")),
        ({"lora_name": "sql"}, "secret-M", ("RequestValidationError", "admin")),
        ({"lora_name": "sql", "lora_path": "/p"}, "secret-K", ("invalid_api_key", None)),
        ({"lora_name": "sql", "lora_path": "/p"}, "wrong", ("invalid_api_key", None)),
        ({"lora_name": "sql", "lora_path": "/p"}, None, ("invalid_api_key", None)),
    ],
)
def test_refused_calls_are_lines_too(
    harness: Harness,
    caplog: pytest.LogCaptureFixture,
    body: dict[str, str],
    key: str | None,
    told: tuple[str, str | None],
) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    harness.post("/v1/load_lora_adapter", body, headers=headers)

    (record,) = [fields_of(line) for line in lines(caplog)]
    assert (record["outcome"], record["key"]) == told
    assert record["after"] is None
    assert "secret" not in caplog.text


def test_no_name_can_write_a_line_of_its_own(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    name = 'x" outcome="ok"\nlora_server.audit: forged'

    harness.post("/v1/unload_lora_adapter", {"lora_name": name}, headers=ADMIN)

    (line,) = lines(caplog)
    assert "\n" not in line
    assert (fields_of(line)["name"], fields_of(line)["outcome"]) == (name, "adapter_not_found")


def test_ordinary_calls_are_not_recorded(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.get("/v1/models", headers=ADMIN)
    harness.get("/health")

    assert lines(caplog) == []
