"""The file of keys: its forms, its mistakes, all at once, and how it is read again."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from lora_server.errors import AuthenticationError, StartupError
from lora_server.http.key_file import KeyFile, read_keys
from lora_server.http.keys import Access, ApiKeys

if TYPE_CHECKING:
    from pathlib import Path


class Clock:
    """Stands still until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def entry(name: str = "team", **fields: Any) -> dict[str, Any]:
    return {"name": name, "key": f"secret-{name}", "adapters": "*", **fields}


def write(path: Path, *entries: Any) -> Path:
    path.write_text(yaml.safe_dump(list(entries)))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def problems_of(path: Path, *, taken: ApiKeys | None = None) -> str:
    with pytest.raises(StartupError) as caught:
        read_keys(path, taken=() if taken is None else taken.fixed)
    return "\n".join(caught.value.problems)


def test_an_entry_has_rights_and_limits(path: Path) -> None:
    fields: dict[str, Any] = {"adapters": ["sql", "team-*"], "may_use_base": True, "is_admin": True}
    limits: dict[str, Any] = {"requests_per_minute": 5, "tokens_per_minute": 1000}

    (key,) = read_keys(write(path, entry(**fields, **limits)))

    assert (key.name, key.digest) == ("team", hashlib.sha256(b"secret-team").digest())
    assert (key.may_use_base, key.is_admin) == (True, True)
    assert (key.requests_per_minute, key.tokens_per_minute) == (5, 1000)
    assert [key.sees(name) for name in ("sql", "team-a", "sql2", "Team-a")] == [
        *(True, True, False, False)
    ]
    assert not key.sees_everything


def test_what_is_not_said_is_not_allowed(path: Path) -> None:
    (key,) = read_keys(write(path, entry()))

    assert (key.may_use_base, key.is_admin) == (False, False)
    assert key.sees("anything")


def test_a_file_may_hold_digests_in_place_of_keys_and_be_json(path: Path) -> None:
    digest = hashlib.sha256(b"K").hexdigest()
    path.write_text(json.dumps([{"name": "a", "key_sha256": digest, "adapters": "*"}]))
    keys = ApiKeys(file=KeyFile(str(path)))

    assert keys.admit("Bearer K", Access.USER).key.name == "a"
    with pytest.raises(AuthenticationError):
        keys.admit(f"Bearer {digest}", Access.USER)


def test_every_mistake_is_told_and_no_key_is_shown(path: Path) -> None:
    write(
        path,
        entry("with space"),
        entry("both", key_sha256="0" * 64),
        {"name": "neither", "adapters": "*"},
        {"name": "open", "key": "secret-open"},
        entry("typo", adaptors=["sql"]),
        entry("kinds", adapters="sql", requests_per_minute=0, may_use_base="yes"),
        entry("short", key=None, key_sha256="secret"),
        entry("spaced", key="secret one"),
        "secret-text",
        entry("fine"),
        entry("fine", key="secret-2"),
        entry("twin", key="secret-fine"),
        entry("api-key-1"),
        entry("thief", key="secret-option"),
    )

    text = problems_of(path, taken=ApiKeys(user=("secret-option",)))

    for part in (
        "entry 1 ('with space'): name",
        "entry 2 ('both'): expected either key or key_sha256",
        "entry 3 ('neither'): expected either key or key_sha256",
        "entry 4 ('open'): adapters",
        "entry 5 ('typo'): adaptors",
        "entry 6 ('kinds'): adapters",
        "entry 6 ('kinds'): requests_per_minute",
        "entry 6 ('kinds'): may_use_base",
        "entry 7 ('short'): key_sha256",
        "entry 8 ('spaced'): key",
        "entry 9: ",
        "the name 'fine' occurs twice",
        "'fine' and 'twin' have the same key",
        "the name 'api-key-1' occurs twice",
        "'thief' and 'api-key-1' have the same key",
    ):
        assert part in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "holds nothing"),
        (b"[]", "holds nothing"),
        (b"name: a", "holds a dict, expected a list"),
        (b"- name: [secret", "neither YAML nor JSON at line"),
        (b"\xff\xfe", "no UTF-8"),
    ],
)
def test_a_file_of_another_form_is_refused(path: Path, content: bytes, told: str) -> None:
    path.write_bytes(content)

    text = problems_of(path)

    assert told in text
    assert str(path) in text
    assert "secret" not in text


def test_a_file_that_is_not_there_is_refused(path: Path) -> None:
    assert "cannot be read: No such file" in problems_of(path)


def test_a_changed_file_is_read_when_it_is_looked_at_again(path: Path) -> None:
    clock = Clock()
    file = KeyFile(str(write(path, entry("old"))), clock=clock)

    write(path, entry("renewed"))
    assert [key.name for key in file.current()] == ["old"]
    clock.now += 1
    assert [key.name for key in file.current()] == ["renewed"]


def test_a_file_that_is_replaced_through_a_link_is_read_again(path: Path, tmp_path: Path) -> None:
    clock = Clock()
    path.symlink_to(write(tmp_path / "one.yaml", entry("one")))
    file = KeyFile(str(path), clock=clock)

    path.unlink()
    path.symlink_to(write(tmp_path / "two.yaml", entry("two")))
    clock.now += 1

    assert [key.name for key in file.current()] == ["two"]


def test_a_broken_file_keeps_the_keys_and_is_logged_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    file = KeyFile(str(write(path, entry("old"))), clock=clock)
    keys = ApiKeys(file=file)

    write(path, entry("new", key="secret new"), entry("other", adapters="secret"))
    for _ in range(3):
        clock.now += 1
        assert keys.admit("Bearer secret-old", Access.USER).key.name == "old"

    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "entry 1 ('new')" in record.getMessage()
    assert "entry 2 ('other')" in record.getMessage()
    assert "secret" not in record.getMessage()
    path.unlink()
    clock.now += 1
    assert [key.name for key in file.current()] == ["old"]
    write(path, entry("new"))
    clock.now += 1
    assert [key.name for key in file.current()] == ["new"]


def test_a_reload_does_not_wait_for_the_clock(path: Path) -> None:
    keys = ApiKeys(file=KeyFile(str(write(path, entry("old"))), clock=Clock()))

    write(path, entry("new"))
    keys.reload()

    assert keys.admit("Bearer secret-new", Access.USER).key.name == "new"
    with pytest.raises(AuthenticationError):
        keys.admit("Bearer secret-old", Access.USER)


@pytest.mark.parametrize(
    ("admin", "is_admin", "opening"),
    [
        (None, False, {"K"}),
        (None, True, {"secret-team"}),
        ("M", False, {"M"}),
        ("M", True, {"M", "secret-team"}),
    ],
)
def test_who_manages_where_there_is_a_file(
    path: Path, admin: str | None, is_admin: bool, opening: set[str]
) -> None:
    file = KeyFile(str(write(path, entry(is_admin=is_admin))))
    keys = ApiKeys(user=("K",), admin=admin, file=file)

    def opens(key: str) -> bool:
        try:
            keys.admit(f"Bearer {key}", Access.ADMIN)
        except AuthenticationError:
            return False
        return True

    assert {key for key in ("K", "M", "secret-team") if opens(key)} == opening
    with pytest.raises(AuthenticationError, match="an API key is needed"):
        keys.admit(None, Access.USER)
