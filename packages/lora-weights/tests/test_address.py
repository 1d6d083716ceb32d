"""What a source text names, without asking anybody."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lora_weights import AdapterNotFoundError, SourceError, load_adapter
from lora_weights.sources.address import Address, SourceKind, parse_address, shown_source
from lora_weights.sources.options import FetchOptions


def test_every_scheme_is_taken_apart() -> None:
    assert parse_address("s3://bucket/team/sql/") == Address(
        kind=SourceKind.OBJECTS, shown="s3://bucket/team/sql", location="s3://bucket/team/sql"
    )
    assert parse_address("gs://bucket/a b?c").location == "gs://bucket/a b?c"
    assert parse_address("https://u:p%40@host:8443/x/?sig=1#y") == Address(
        kind=SourceKind.HTTP,
        shown="https://host:8443/x/",
        location="https://host:8443/x",
        query="sig=1",
        user=("u", "p@"),
    )
    assert parse_address("file:///a%20b").location == "/a b"
    assert parse_address("hf://org/name@v1/sub/folder/") == Address(
        kind=SourceKind.HUB,
        shown="hf://org/name@v1/sub/folder/",
        location="org/name",
        revision="v1",
        subfolder="sub/folder",
    )


@pytest.mark.parametrize(
    ("source", "revision", "subfolder"),
    [
        ("hf://org/name", None, ""),
        ("hf://org/name/sub", None, "sub"),
        ("hf://org/name@refs/pr/3", "refs/pr/3", ""),
        ("hf://org/name@refs/pr/3/sub", "refs/pr/3", "sub"),
        ("hf://org/name@feature%2Fx/sub", "feature/x", "sub"),
        ("hf://org/name@0123456789abcdef", "0123456789abcdef", ""),
    ],
)
def test_hub_addresses_name_revision_and_folder(
    source: str, revision: str | None, subfolder: str
) -> None:
    address = parse_address(source)

    assert (address.kind, address.location) == (SourceKind.HUB, "org/name")
    assert (address.revision, address.subfolder) == (revision, subfolder)


@pytest.mark.parametrize(
    "source",
    [
        "ftp://host/a",
        "s3://",
        "s3://bucket",
        "s3://bucket/",
        "s3://key:secret@bucket/a",
        "https://",
        "https:///a",
        "https://host:port/a",
        "https://[::1/a",
        "file://host/a",
        "hf://",
        "hf://org",
        "hf://org/name/../../other",
        "hf://-org/name",
        "memory://a",
        "https://host/adapter_model.safetensors",
        "s3://bucket/a/adapter_config.json",
        "simplecache::s3://bucket/a",
    ],
)
def test_what_is_no_address_is_refused(source: str) -> None:
    with pytest.raises((SourceError, AdapterNotFoundError)) as caught:
        load_adapter(source)

    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "org/name",
        "org/name@main",
        "org/name@refs/pr/1",
        "Org-1/Name_2.x",
    ],
)
def test_owner_and_name_are_a_hub_id_where_no_such_path_is(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert parse_address(source).kind is SourceKind.HUB


@pytest.mark.parametrize("exists", ["org", "org/name", "org/name@v1"])
def test_c05_a_text_is_a_path_where_it_or_its_first_folder_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / exists).mkdir(parents=True)

    kinds = {parse_address(source).kind for source in ("org/name", "org/name@v1")}

    assert kinds == {SourceKind.FOLDER}


def test_c05_a_first_folder_that_is_a_broken_link_still_makes_it_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").symlink_to("gone")

    assert parse_address("org/name").kind is SourceKind.FOLDER


LOCAL = [
    "name",
    "./org/name",
    "../org/name",
    "/org/name",
    "~/name",
    "org/name/",
    "a/b/c",
    "org\\name",
    ".org/name",
    "org/..",
    "org/na me",
    "org/name@",
    "org/na--me",
    "@org/name",
    Path("org/name"),
]


@pytest.mark.parametrize("source", LOCAL)
def test_c05_a_path_that_looks_local_is_never_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | Path
) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        pytest.fail("a connection was opened")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)

    with pytest.raises(AdapterNotFoundError):
        load_adapter(source)


@pytest.mark.parametrize(
    ("source", "module", "extra"),
    [
        ("s3://bucket/a", "fsspec", "lora-weights[remote]"),
        ("s3://bucket/a", "s3fs", "lora-weights[remote]"),
        ("gs://bucket/a", "gcsfs", "lora-weights[remote]"),
        ("hf://org/name", "huggingface_hub", "lora-weights[hub]"),
    ],
)
def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, module: str, extra: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(SourceError) as caught:
        load_adapter(source, cache_dir=tmp_path)

    assert extra in caught.value.reason
    assert isinstance(caught.value.__cause__, ImportError)


def test_c05_without_the_extra_owner_and_name_are_a_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(AdapterNotFoundError, match=r"no folder org/name; .*lora-weights\[hub\]"):
        load_adapter("org/name")


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("https://me:secret@host/a/?token=secret#secret", "https://host/a/"),
        ("HTTPS://a@b:secret@host/a", "HTTPS://host/a"),
        ("s3://key:secret@bucket/a", "s3://bucket/a"),
        ("hf://org/name@v1", "hf://org/name@v1"),
        ("file:///a@b", "file:///a@b"),
        ("/a?b#c", "/a?b#c"),
        (Path("a@b"), "a@b"),
    ],
)
def test_addresses_are_shown_without_credentials(source: str | Path, shown: str) -> None:
    assert shown_source(source) == shown


def test_downloads_go_below_the_home_folder_where_nothing_else_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    assert FetchOptions().cache_folder == tmp_path / ".cache" / "lora-weights"
    assert FetchOptions(cache_dir="~/x").cache_folder == tmp_path / "x"


def test_a_limit_below_one_byte_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes is 0") as caught:
        load_adapter(tmp_path, max_bytes=0)

    assert not isinstance(caught.value, SourceError)
