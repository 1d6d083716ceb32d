"""Adapters behind a web address, on a server that cuts, lies and changes its mind."""

from __future__ import annotations

import base64
import json
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lora_weights import (
    AdapterNotFoundError,
    InvalidAdapterError,
    SourceError,
    UnsafeFormatError,
    inspect_adapter,
    load_adapter,
)
from lora_weights.sources import fetch as fetch_module
from lora_weights.sources.folder import INDEX_FILE
from lora_weights.sources.http import HttpStore
from lora_weights.tensors import write_safetensors
from lora_weights.testing import build_raw_adapter, llama_modules, write_adapter

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import FileServer

    from lora_weights import Adapter

MODULES = llama_modules()
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "local", MODULES, r=16)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def url(server: FileServer, folder: Path) -> str:
    server.put_folder(folder, "/team/sql adapter")
    return f"{server.url}/team/sql%20adapter"


def load(url: str, cache: Path, **arguments: Any) -> Adapter:
    return load_adapter(url, cache_dir=cache, **arguments)


def refused(url: str, cache: Path, **arguments: Any) -> SourceError:
    with pytest.raises(SourceError) as caught:
        load(url, cache, **arguments)
    return caught.value


def files_in(cache: Path) -> list[Path]:
    """Return what a cache holds beside its locks."""
    return [path for path in cache.rglob("*") if path.is_file() and path.parent.name != "locks"]


def finished_in(cache: Path) -> list[str]:
    """Return the finished files in a cache; nothing else may be there but notes of versions."""
    names = sorted(path.name for path in files_in(cache))
    return [name for name in names if name != "finished.json"]


def replace(server: FileServer, tmp_path: Path, seed: int) -> Path:
    """Serve another adapter in place of the first."""
    other = write_adapter(tmp_path / f"other{seed}", MODULES, r=16, seed=seed)
    server.put_folder(other, "/team/sql adapter")
    return other


@pytest.mark.parametrize("ending", ["", "/", "/#part"])
def test_an_address_gives_the_adapter_of_the_folder(
    url: str, folder: Path, cache: Path, ending: str
) -> None:
    adapter = load(url + ending, cache)

    assert adapter.digest == load_adapter(folder).digest
    assert adapter.source == url + ending.rstrip("#part")


def test_only_configuration_and_weights_are_fetched(
    server: FileServer, url: str, cache: Path
) -> None:
    server.files["/team/sql adapter/tokenizer.json"] = b"{}"

    load(url, cache)

    assert [request.path.rpartition("/")[2] for request in server.requests] == [
        "adapter_config.json",
        WEIGHTS,
    ]


def test_what_is_in_the_cache_is_not_sent_again(server: FileServer, url: str, cache: Path) -> None:
    first = load(url, cache)
    server.requests.clear()

    second = load(url, cache)

    assert second.digest == first.digest
    assert [request.status for request in server.requests] == [304, 304]
    assert finished_in(cache) == ["adapter_config.json", WEIGHTS]


def test_a_damaged_file_in_the_cache_is_fetched_again(url: str, cache: Path, folder: Path) -> None:
    load(url, cache)
    [path] = [path for path in files_in(cache) if path.name == WEIGHTS]
    path.write_bytes(path.read_bytes()[:-100])

    assert load(url, cache).digest == load_adapter(folder).digest


def test_a_new_version_replaces_the_one_in_the_cache(
    server: FileServer, url: str, cache: Path, tmp_path: Path
) -> None:
    load(url, cache)
    other = replace(server, tmp_path, seed=1)

    adapter = load(url, cache)

    assert adapter.digest == load_adapter(other).digest
    assert finished_in(cache) == ["adapter_config.json", WEIGHTS]


@pytest.mark.parametrize("etag", ["weak", "fresh", "none"])
def test_without_a_version_to_rely_on_nothing_old_is_served(
    server: FileServer, url: str, cache: Path, tmp_path: Path, etag: str
) -> None:
    server.etag = etag
    load(url, cache)
    other = replace(server, tmp_path, seed=1)

    adapter = load(url, cache)

    assert adapter.digest == load_adapter(other).digest
    assert finished_in(cache) == ["adapter_config.json", WEIGHTS]


@pytest.mark.parametrize("etag", ["strong", "date"])
def test_a_cut_connection_is_continued_where_it_ended(
    server: FileServer, url: str, cache: Path, folder: Path, etag: str
) -> None:
    server.etag = etag
    size = (folder / WEIGHTS).stat().st_size
    server.cuts = [10_000, size // 2, 1000]  # the first one is longer than the configuration

    adapter = load(url, cache)

    starts = [r.headers.get("Range") for r in server.requests if r.path.endswith(WEIGHTS)]
    assert adapter.digest == load_adapter(folder).digest
    assert starts == [None, f"bytes={size // 2}-", f"bytes={size // 2 + 1000}-"]
    assert server.sent(WEIGHTS) == size


def test_a_cut_connection_without_a_version_starts_over(
    server: FileServer, url: str, cache: Path, folder: Path
) -> None:
    server.etag = "none"
    server.cuts = [10_000, 50_000]

    adapter = load(url, cache)

    assert adapter.digest == load_adapter(folder).digest
    assert server.sent(WEIGHTS) == 50_000 + (folder / WEIGHTS).stat().st_size


def test_a_server_without_ranges_is_read_from_the_start_again(
    server: FileServer, url: str, cache: Path, folder: Path
) -> None:
    server.has_ranges = False
    server.cuts = [10_000, 50_000]

    assert load(url, cache).digest == load_adapter(folder).digest


def test_an_interrupted_download_is_continued_by_the_next_call(
    server: FileServer, url: str, cache: Path, folder: Path
) -> None:
    size = (folder / WEIGHTS).stat().st_size
    server.cuts = [10_000, size // 2, *[0] * fetch_module.MAX_ATTEMPTS]
    error = refused(url, cache)
    kept = {path.name: path.stat().st_size for path in files_in(cache)}
    server.cuts, server.requests = [], []

    adapter = load(url, cache)

    assert "lost the connection" in error.reason
    assert kept.pop("partial") == size // 2
    assert list(kept) == ["partial.json"]
    assert adapter.digest == load_adapter(folder).digest
    assert server.sent(WEIGHTS) == size - size // 2


def test_a_file_that_changed_since_the_interruption_starts_over(
    server: FileServer, url: str, cache: Path, tmp_path: Path
) -> None:
    server.cuts = [10_000, 50_000, *[0] * fetch_module.MAX_ATTEMPTS]
    refused(url, cache)
    server.cuts = []
    other = replace(server, tmp_path, seed=1)

    adapter = load(url, cache)

    assert adapter.digest == load_adapter(other).digest


def test_a_file_that_changes_between_two_parts_starts_over(
    server: FileServer, url: str, cache: Path, tmp_path: Path
) -> None:
    server.cuts = [10_000, 50_000]
    other = write_adapter(tmp_path / "other", MODULES, r=16, seed=1)

    def swap(_: Any, request: Any) -> bool:
        if "Range" in request.headers:
            server.put_folder(other, "/team/sql adapter")
        return False

    server.routes.append(swap)

    assert load(url, cache).digest == load_adapter(other).digest


def test_a_server_that_ignores_the_condition_of_a_range_is_found_out(
    server: FileServer, url: str, cache: Path, tmp_path: Path
) -> None:
    server.cuts = [10_000, 50_000]
    other = write_adapter(tmp_path / "other", MODULES, r=16, seed=1)

    def swap(_: Any, request: Any) -> bool:
        if request.headers.pop("If-Range", None):
            server.put_folder(other, "/team/sql adapter")
        return False

    server.routes.append(swap)

    assert load(url, cache).digest == load_adapter(other).digest


@pytest.mark.parametrize("etag", ["strong", "none"])
def test_a_length_that_is_too_long_is_an_error(
    server: FileServer, url: str, cache: Path, etag: str
) -> None:
    server.etag = etag
    server.declared = 10**6

    error = refused(url, cache)

    assert "lost the connection" in error.reason


def test_a_length_that_is_too_short_gives_a_file_that_is_cut_off(
    server: FileServer, url: str, cache: Path, folder: Path
) -> None:
    config = (folder / "adapter_config.json").stat().st_size
    server.files = {path: content.ljust(config + 1000) for path, content in server.files.items()}
    server.declared = config

    with pytest.raises(InvalidAdapterError, match="cut off"):
        load(url, cache)

    assert files_in(cache) == []


def test_a_server_that_declares_too_much_is_refused_before_it_sends(
    server: FileServer, url: str, cache: Path, folder: Path
) -> None:
    size = sum(path.stat().st_size for path in folder.iterdir())

    error = refused(url, cache, max_bytes=size - 1)

    assert f"{size} bytes or more" in error.reason
    assert f"at most {size - 1}" in error.reason
    assert files_in(cache) == []
    assert load(url, cache, max_bytes=size).digest == load_adapter(folder).digest


def test_a_server_that_sends_without_end_is_stopped(
    server: FileServer, url: str, cache: Path
) -> None:
    server.is_chunked = True
    server.files[f"/team/sql adapter/{WEIGHTS}"] = bytes(50_000_000)

    error = refused(url, cache, max_bytes=2_000_000)

    assert "at most 2000000" in error.reason
    assert server.sent(WEIGHTS) < 20_000_000
    assert files_in(cache) == []


def test_an_undeclared_length_is_read_to_its_end(
    server: FileServer, url: str, cache: Path, folder: Path
) -> None:
    server.is_chunked = True
    server.cuts = [10_000, 50_000]

    assert load(url, cache).digest == load_adapter(folder).digest


def test_c05_an_address_without_a_configuration_is_not_found(
    server: FileServer, cache: Path
) -> None:
    with pytest.raises(AdapterNotFoundError, match=r"there is no adapter_config\.json in http"):
        load(f"{server.url}/nothing", cache)

    assert files_in(cache) == []


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS])
@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
def test_an_error_of_the_server_is_no_missing_adapter(
    server: FileServer, url: str, cache: Path, name: str, status: int
) -> None:
    server.statuses[f"/team/sql adapter/{name}"] = status

    error = refused(url, cache)

    assert f"{name}: HTTP {status}" in error.reason
    assert files_in(cache) == []


def test_a_server_that_is_not_there_is_a_source_error(cache: Path) -> None:
    error = refused("http://127.0.0.1:9/adapter", cache)

    assert isinstance(error.__cause__, ConnectionError)


def test_missing_weights_are_named_as_for_a_folder(
    server: FileServer, url: str, cache: Path
) -> None:
    del server.files[f"/team/sql adapter/{WEIGHTS}"]

    with pytest.raises(InvalidAdapterError, match=r"expected one of adapter_model\.safetensors"):
        load(url, cache)

    assert files_in(cache) == []


def test_a_bad_adapter_leaves_nothing_behind(server: FileServer, url: str, cache: Path) -> None:
    path = f"/team/sql adapter/{WEIGHTS}"
    server.files[path] = server.files[path][:-8]

    report = inspect_adapter(url, cache_dir=cache)

    assert "cut off" in str(report.problems[0])
    assert files_in(cache) == []


def test_c49_pickles_behind_an_address_need_permission_and_are_not_fetched_before(
    server: FileServer, url: str, cache: Path, folder: Path, tmp_path: Path
) -> None:
    del server.files[f"/team/sql adapter/{WEIGHTS}"]
    adapter = load_adapter(folder)
    torch.save(dict(build_raw_adapter(MODULES, r=16).tensors), tmp_path / "x.bin")
    server.files["/team/sql adapter/adapter_model.bin"] = (tmp_path / "x.bin").read_bytes()

    with pytest.raises(UnsafeFormatError):
        load(url, cache)

    assert files_in(cache) == []
    assert load(url, cache, allow_pickle=True).digest == adapter.digest


def test_files_of_a_sharded_checkpoint_are_fetched_by_its_index(
    server: FileServer, cache: Path, tmp_path: Path
) -> None:
    raw = build_raw_adapter(MODULES, r=16)
    folder = write_adapter(tmp_path / "sharded", MODULES, r=16)
    digest = load_adapter(folder).digest
    (folder / WEIGHTS).unlink()
    keys = sorted(raw.tensors)
    for i in range(2):
        write_safetensors(folder / f"s{i}.safetensors", {k: raw.tensors[k] for k in keys[i::2]})
    table = {key: f"s{i % 2}.safetensors" for i, key in enumerate(keys)}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": table}))
    server.put_folder(folder, "/sharded")

    assert load(f"{server.url}/sharded", cache).digest == digest
    del server.files["/sharded/s1.safetensors"]
    with pytest.raises(InvalidAdapterError, match=r"s1\.safetensors missing"):
        load(f"{server.url}/sharded", cache)


def test_headers_alone_are_fetched_for_a_report_without_numbers(
    server: FileServer, url: str, cache: Path, folder: Path
) -> None:
    report = inspect_adapter(url, read_tensors=False, cache_dir=cache)

    local = inspect_adapter(folder, read_tensors=False)
    assert report.problems == ()
    assert report.modules == local.modules
    assert (report.num_tensors, report.weights_bytes) == (local.num_tensors, local.weights_bytes)
    assert server.sent(WEIGHTS) <= fetch_module.FRONT_BYTES < local.weights_bytes
    assert finished_in(cache) == ["adapter_config.json"]


def test_a_long_header_is_fetched_whole(
    server: FileServer, url: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "FRONT_BYTES", 64)

    report = inspect_adapter(url, read_tensors=False, cache_dir=cache)

    assert report.problems == ()
    assert report.num_tensors == 2 * len(MODULES)
    assert server.sent(WEIGHTS) < report.weights_bytes


def test_a_query_goes_with_every_file_and_is_never_shown(
    server: FileServer, url: str, cache: Path
) -> None:
    adapter = load(f"{url}?token=s3cr3t-value&x=1", cache)
    server.statuses[f"/team/sql adapter/{WEIGHTS}"] = 500
    error = refused(f"{url}?token=s3cr3t-value", cache)
    report = inspect_adapter(f"{url}?token=s3cr3t-value", cache_dir=cache)

    assert {request.query for request in server.requests} == {
        "token=s3cr3t-value&x=1",
        "token=s3cr3t-value",
    }
    shown = [adapter.source, repr(adapter), *map(str, report.problems), report.source]
    assert "s3cr3t" not in "".join([*shown, *traceback.format_exception(error)])


def test_user_and_password_are_sent_and_never_shown(
    server: FileServer, url: str, cache: Path
) -> None:
    secret = url.replace("http://", "http://me:p4ss%2Fword@")
    server.authorization = "Basic " + base64.b64encode(b"me:p4ss/word").decode()

    adapter = load(secret, cache)
    server.authorization = "Basic other"
    error = refused(secret, cache)
    server.authorization = None
    with pytest.raises(AdapterNotFoundError) as missing:
        load(secret.replace("sql", "no"), cache)

    shown = [adapter.source, *traceback.format_exception(error)]
    shown += traceback.format_exception(missing.value)
    assert "p4ss" not in "".join(shown)
    assert error.source == url


def test_headers_of_the_caller_are_sent_and_never_shown(
    server: FileServer, url: str, cache: Path
) -> None:
    server.authorization = "Bearer t0k3n-value"
    options = {"headers": {"Authorization": "Bearer t0k3n-value"}}

    load(url, cache, storage_options=options)
    server.authorization = "Bearer other"
    error = refused(url, cache, storage_options=options)

    assert "HTTP 401" in error.reason
    assert "t0k3n" not in "".join(traceback.format_exception(error))


def test_storage_options_that_do_not_exist_are_named(url: str, cache: Path) -> None:
    assert "anon" in refused(url, cache, storage_options={"anon": True}).reason
    assert "timeout_s" in refused(url, cache, storage_options={"timeout_s": -1}).reason
    assert "headers" in refused(url, cache, storage_options={"headers": {"a": 1}}).reason


def test_credentials_stay_with_their_server_when_it_redirects(
    server: FileServer, url: str, cache: Path
) -> None:
    path = f"/team/sql adapter/{WEIGHTS}"
    server.files["/cdn/weights"] = server.files[path]
    # The same server under another name is another host for a client.
    server.redirects[path] = server.url.replace("127.0.0.1", "localhost") + "/cdn/weights"

    load(url, cache, storage_options={"headers": {"Authorization": "Bearer t0k3n"}})

    sent = {request.path: request.headers.get("Authorization") for request in server.requests}
    assert sent[path] == "Bearer t0k3n"
    assert sent["/cdn/weights"] is None


def test_credentials_follow_a_redirect_on_their_server(
    server: FileServer, url: str, cache: Path
) -> None:
    path = f"/team/sql adapter/{WEIGHTS}"
    server.files["/moved"] = server.files[path]
    server.redirects[path] = "/moved"
    server.authorization = "Bearer t0k3n"

    load(url, cache, storage_options={"headers": {"Authorization": "Bearer t0k3n"}})


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://host/x"])
def test_a_redirect_out_of_the_web_is_not_followed(
    server: FileServer, url: str, cache: Path, target: str
) -> None:
    server.redirects[f"/team/sql adapter/{WEIGHTS}"] = target

    refused(url, cache)


def test_two_downloads_of_one_source_at_once_share_the_work(
    server: FileServer, url: str, cache: Path, folder: Path
) -> None:
    start = threading.Barrier(4)

    def run(_: int) -> str:
        start.wait()
        return load(url, cache).digest

    with ThreadPoolExecutor(4) as pool:
        digests = set(pool.map(run, range(4)))

    statuses = sorted(r.status for r in server.requests if r.path.endswith(WEIGHTS))
    assert digests == {load_adapter(folder).digest}
    assert finished_in(cache) == ["adapter_config.json", WEIGHTS]
    assert statuses == [200, 304, 304, 304]


def test_a_store_of_the_web_cannot_be_listed() -> None:
    assert HttpStore("http://127.0.0.1:9/x").list_names() is None
