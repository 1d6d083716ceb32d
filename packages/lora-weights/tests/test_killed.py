"""A process that is killed while it downloads: nothing half counts as whole, and nothing stays."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from lora_weights import inspect_adapter, load_adapter
from lora_weights.testing import llama_modules, write_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import FileServer, Request

WEIGHTS = "adapter_model.safetensors"
LOAD = "lora_weights.load_adapter(sys.argv[1], cache_dir=sys.argv[2])"
INSPECT = "lora_weights.inspect_adapter(sys.argv[1], cache_dir=sys.argv[2], read_tensors=False)"
WITHIN_S = 20.0


class Stall:
    """Sends the first bytes of the weights, once, and then nothing more."""

    def __init__(self, server: FileServer, num_bytes: int) -> None:
        self.server = server
        self.num_bytes = num_bytes
        self.has_sent = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, handler: Any, request: Request) -> bool:
        if not request.path.endswith(WEIGHTS) or self.has_sent.is_set():
            return False
        content = self.server.files[request.path]
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        for key, value in self.server.version(content).items():
            handler.send_header(key, value)
        handler.end_headers()
        handler.wfile.write(content[: self.num_bytes])
        self.has_sent.set()
        self.may_end.wait(WITHIN_S)
        return True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "local", llama_modules(), r=64)


@pytest.fixture
def url(server: FileServer, folder: Path) -> str:
    server.put_folder(folder, "/team/sql")
    return f"{server.url}/team/sql"


@pytest.fixture
def stall(server: FileServer, folder: Path) -> Iterator[Stall]:
    made = Stall(server, (folder / WEIGHTS).stat().st_size // 2)
    server.routes.append(made)
    yield made
    made.may_end.set()


def kill_while(call: str, url: str, cache: Path, stall: Stall, wanted: str) -> None:
    """Make a call in a process of its own, and kill it once something like `wanted` is there.

    Of a download, a good part has to be on the disk as well.
    """
    command = [sys.executable, "-c", f"import sys, lora_weights; {call}", url, str(cache)]
    with subprocess.Popen(command) as process:
        try:
            assert stall.has_sent.wait(WITHIN_S)
            ticker = threading.Event()
            for _ in range(int(WITHIN_S * 100)):
                if any(is_large(path) for path in cache.glob(wanted)):
                    break
                ticker.wait(0.01)
            assert process.poll() is None
        finally:
            process.kill()


def is_large(path: Path) -> bool:
    return path.is_dir() or path.stat().st_size > 100_000


def names(cache: Path) -> set[str]:
    return {path.name for path in cache.rglob("*") if path.parent.name != "locks"}


def test_a_killed_download_is_continued_and_never_counts_as_whole(
    server: FileServer, url: str, folder: Path, stall: Stall, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    kill_while(LOAD, url, cache, stall, f"*/{WEIGHTS}/partial")
    (partial,) = cache.glob(f"*/{WEIGHTS}/partial")
    have = partial.stat().st_size
    assert not list(cache.glob(f"*/{WEIGHTS}/*/{WEIGHTS}"))
    server.requests.clear()

    adapter = load_adapter(url, cache_dir=cache)

    assert adapter.digest == load_adapter(folder).digest
    assert 0 < have < (folder / WEIGHTS).stat().st_size
    ranges = [r.headers.get("Range") for r in server.requests if r.path.endswith(WEIGHTS)]
    assert ranges == [f"bytes={have}-"]
    assert "partial" not in names(cache)


@pytest.mark.parametrize("function", ["load_adapter", "inspect_adapter"])
def test_a_killed_inspection_leaves_nothing_behind(
    url: str, stall: Stall, tmp_path: Path, function: str
) -> None:
    cache = tmp_path / "cache"
    stall.num_bytes = 100
    kill_while(INSPECT, url, cache, stall, "*/scratch-*")
    assert any(name.startswith("scratch-") for name in names(cache))

    if function == "load_adapter":
        load_adapter(url, cache_dir=cache)
    else:
        assert inspect_adapter(url, cache_dir=cache).is_loadable

    assert not any(name.startswith("scratch-") for name in names(cache))
