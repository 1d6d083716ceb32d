"""Object stores: an S3-compatible server that the tests start, and the routes of GCS."""

from __future__ import annotations

import json
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

import pytest
from moto.server import ThreadedMotoServer

from lora_weights import (
    AdapterNotFoundError,
    InvalidAdapterError,
    SourceError,
    UnsafeFormatError,
    inspect_adapter,
    load_adapter,
)
from lora_weights.sources import objects as objects_module
from lora_weights.testing import llama_modules, write_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import FileServer, Request

MODULES = llama_modules()
WEIGHTS = "adapter_model.safetensors"
BUCKET = "team-adapters"


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """An S3 server with one empty bucket; yields boto3's client of it."""
    web = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    web.start()
    host, port = web.get_host_and_port()
    client = import_module("boto3").client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    client.create_bucket(Bucket=BUCKET)
    yield client
    client.close()
    web.stop()


@pytest.fixture
def options(s3: Any) -> dict[str, object]:
    return {"key": "test", "secret": "t3st-s3cret", "endpoint_url": s3.meta.endpoint_url}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "local", MODULES, r=16)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def upload(s3: Any, folder: Path, prefix: str) -> str:
    for path in folder.iterdir():
        s3.put_object(Bucket=BUCKET, Key=f"{prefix}/{path.name}", Body=path.read_bytes())
    return f"s3://{BUCKET}/{prefix}"


def finished_in(cache: Path) -> list[str]:
    """Return the finished files in a cache."""
    names = [p.name for p in cache.rglob("*") if p.is_file() and p.parent.name != "locks"]
    return sorted(name for name in names if name != "finished.json")


def test_an_adapter_in_s3_is_the_adapter_of_the_folder(
    s3: Any, options: dict[str, object], folder: Path, cache: Path
) -> None:
    url = upload(s3, folder, "a/sql adapter")
    s3.put_object(Bucket=BUCKET, Key="a/sql adapter/tokenizer_config.json", Body=b"{}")

    adapter = load_adapter(url, cache_dir=cache, storage_options=options)
    report = inspect_adapter(f"{url}/", cache_dir=cache, storage_options=options)

    assert adapter.digest == load_adapter(folder).digest
    assert adapter.source == url
    assert finished_in(cache) == ["adapter_config.json", WEIGHTS]
    assert "tokenizer_config.json" in "".join(report.warnings)


def test_what_is_in_the_cache_is_not_read_from_s3_again(  # noqa: PLR0917 - fixtures
    s3: Any,
    options: dict[str, object],
    folder: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = upload(s3, folder, "cached")
    first = load_adapter(url, cache_dir=cache, storage_options=options)

    monkeypatch.setattr(
        objects_module.ObjectStore, "_chunks", lambda *_: map(pytest.fail, ["content was read"])
    )

    second = load_adapter(url, cache_dir=cache, storage_options=options)
    monkeypatch.undo()
    other = write_adapter(tmp_path / "other", MODULES, r=16, seed=1)
    upload(s3, other, "cached")
    third = load_adapter(url, cache_dir=cache, storage_options=options)

    assert second.digest == first.digest
    assert third.digest == load_adapter(other).digest
    assert finished_in(cache) == ["adapter_config.json", WEIGHTS]


def test_only_headers_are_read_from_s3_for_a_report_without_numbers(
    s3: Any,
    options: dict[str, object],
    folder: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = upload(s3, folder, "header")
    read: list[int] = []
    whole = objects_module.ObjectStore._chunks

    def count(*arguments: Any) -> Iterator[bytes]:
        for chunk in whole(*arguments):
            read.append(len(chunk))
            yield chunk

    monkeypatch.setattr(objects_module.ObjectStore, "_chunks", count)

    report = inspect_adapter(url, read_tensors=False, cache_dir=cache, storage_options=options)

    assert report.problems == ()
    assert report.modules == inspect_adapter(folder, read_tensors=False).modules
    assert sum(read) < report.weights_bytes


def test_an_interrupted_read_is_continued_by_the_next_call(
    s3: Any,
    options: dict[str, object],
    folder: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = upload(s3, folder, "interrupted")
    monkeypatch.setattr(objects_module, "_BLOCK_BYTES", 20_000)
    starts: list[int] = []
    whole = objects_module.ObjectStore._chunks

    def cut(store: Any, stream: Any, path: str, *rest: Any) -> Iterator[bytes]:
        starts.append(stream.tell())
        for i, chunk in enumerate(whole(store, stream, path, *rest)):
            if path.endswith(WEIGHTS) and i == 3:
                raise TimeoutError
            yield chunk

    monkeypatch.setattr(objects_module.ObjectStore, "_chunks", cut)

    adapter = load_adapter(url, cache_dir=cache, storage_options=options)

    assert starts[:4] == [0, 0, 60_000, 120_000]
    assert adapter.digest == load_adapter(folder).digest


def test_an_object_that_is_replaced_while_it_is_read_starts_over(  # noqa: PLR0917 - fixtures
    s3: Any,
    options: dict[str, object],
    folder: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = upload(s3, folder, "replaced")
    other = write_adapter(tmp_path / "other", MODULES, r=16, seed=1)
    whole = objects_module.ObjectStore._chunks
    swapped: list[str] = []

    def swap(store: Any, stream: Any, path: str, *rest: Any) -> Iterator[bytes]:
        chunks = whole(store, stream, path, *rest)
        yield next(chunks)
        if path.endswith(WEIGHTS) and not swapped:
            swapped.append(upload(s3, other, "replaced"))
        yield from chunks

    monkeypatch.setattr(objects_module.ObjectStore, "_chunks", swap)

    adapter = load_adapter(url, cache_dir=cache, storage_options=options)

    assert swapped
    assert adapter.digest == load_adapter(other).digest


def test_four_downloads_at_once_do_not_disturb_each_other(
    s3: Any, options: dict[str, object], folder: Path, cache: Path
) -> None:
    url = upload(s3, folder, "parallel")
    start = threading.Barrier(4)

    def run(_: int) -> str:
        start.wait()
        return load_adapter(url, cache_dir=cache, storage_options=options).digest

    with ThreadPoolExecutor(4) as pool:
        digests = set(pool.map(run, range(4)))

    assert digests == {load_adapter(folder).digest}
    assert finished_in(cache) == ["adapter_config.json", WEIGHTS]


def test_c05_a_prefix_without_a_configuration_says_what_is_there(
    s3: Any, options: dict[str, object], folder: Path, cache: Path
) -> None:
    upload(s3, folder, "runs/last/default")
    s3.put_object(Bucket=BUCKET, Key="runs/last/config.json", Body=b"{}")

    with pytest.raises(AdapterNotFoundError) as caught:
        load_adapter(f"s3://{BUCKET}/runs/last", cache_dir=cache, storage_options=options)

    assert "it holds config.json" in caught.value.reason
    assert "in the sub-folder default" in caught.value.reason
    assert finished_in(cache) == []


@pytest.mark.parametrize("url", [f"s3://{BUCKET}/nothing", "s3://no-such-bucket/a"])
def test_a_prefix_or_bucket_that_is_not_there_is_not_found(
    options: dict[str, object], cache: Path, url: str
) -> None:
    with pytest.raises(AdapterNotFoundError):
        load_adapter(url, cache_dir=cache, storage_options=options)

    assert finished_in(cache) == []


def test_pickles_in_s3_need_permission(
    s3: Any, options: dict[str, object], folder: Path, cache: Path
) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    url = upload(s3, folder, "pickled")

    with pytest.raises(UnsafeFormatError, match=r"adapter_model\.bin"):
        load_adapter(url, cache_dir=cache, storage_options=options)

    assert finished_in(cache) == []


def test_a_bad_adapter_in_s3_leaves_nothing_behind(
    s3: Any, options: dict[str, object], folder: Path, cache: Path
) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-8])
    url = upload(s3, folder, "cut")

    with pytest.raises(InvalidAdapterError, match="cut off"):
        load_adapter(url, cache_dir=cache, storage_options=options)

    assert finished_in(cache) == []


def test_the_limit_holds_before_anything_is_read(
    s3: Any, options: dict[str, object], folder: Path, cache: Path
) -> None:
    url = upload(s3, folder, "large")

    with pytest.raises(SourceError, match=r"expected at most 1000 \(max_bytes\)"):
        load_adapter(url, cache_dir=cache, storage_options=options, max_bytes=1000)

    assert finished_in(cache) == []


def test_a_server_that_is_not_there_is_a_source_error_without_credentials(cache: Path) -> None:
    options = {
        "key": "test",
        "secret": "t3st-s3cret",
        "endpoint_url": "http://127.0.0.1:9",
        "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 1},
    }

    with pytest.raises(SourceError) as caught:
        load_adapter("s3://bucket/a", cache_dir=cache, storage_options=options)

    assert "t3st-s3cret" not in "".join(traceback.format_exception(caught.value))
    assert caught.value.source == "s3://bucket/a"


def _gcs(server: FileServer) -> Any:
    """Return a route that answers as the JSON interface of Google Cloud Storage does."""

    def describe(path: str) -> dict[str, object]:
        _, bucket, name = path.split("/", 2)
        content = server.files[path]
        return {
            "bucket": bucket,
            "name": name,
            "size": str(len(content)),
            "generation": str(sum(content) + 1),
            "updated": "2024-01-01T00:00:00Z",
            "timeCreated": "2024-01-01T00:00:00Z",
        }

    def answer(handler: Any, request: Request) -> bool:
        raw = handler.path.partition("?")[0]
        kind, _, rest = raw.partition("/b/")
        if not rest:
            return False
        bucket, _, name = rest.partition("/o")
        path = f"/{bucket}{unquote(name)}"
        if kind == "/download/storage/v1" and path in server.files:
            request.path = path
            return False  # the server's own way of sending content
        if name:
            body = describe(path) if path in server.files else None
        else:
            prefix = f"/{bucket}/" + parse_qs(request.query).get("prefix", [""])[0]
            below = [p for p in server.files if p.startswith(prefix)]
            body = {
                "items": [describe(p) for p in below if "/" not in p.removeprefix(prefix)],
                "prefixes": [],
            }
        text = json.dumps(body).encode()
        status = 404 if body is None else 200
        handler.answer(request, status, {"Content-Type": "application/json"}, text)
        return True

    return answer


def test_an_adapter_in_gcs_is_the_adapter_of_the_folder(
    server: FileServer, folder: Path, cache: Path
) -> None:
    server.put_folder(folder, "/bucket/team/sql")
    server.routes.append(_gcs(server))
    # gcsfs asks for the kind of the bucket over gRPC first, which this server does not speak.
    options = {"endpoint_url": server.url, "token": "anon", "retry_timeout": 0.1}

    adapter = load_adapter("gs://bucket/team/sql", cache_dir=cache, storage_options=options)
    again = load_adapter("gs://bucket/team/sql", cache_dir=cache, storage_options=options)

    assert adapter.digest == again.digest == load_adapter(folder).digest
    assert server.sent(WEIGHTS) == (folder / WEIGHTS).stat().st_size
    with pytest.raises(AdapterNotFoundError):
        load_adapter("gs://bucket/team/other", cache_dir=cache, storage_options=options)
