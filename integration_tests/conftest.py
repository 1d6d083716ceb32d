"""Fixtures of the integration tests: tiny worlds, made once a session, and servers for them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

# Tests are imported by file (`--import-mode=importlib`), so what they share needs a place to be
# found in. Only this folder is added, not the repository's root.
sys.path.insert(0, str(Path(__file__).parent))

from support.server import serve
from support.worlds import World, build_world

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import httpx
    from support.fixture_types import MakeWorld, StartServer
    from support.server import Server


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the soak test be shorter than its ten minutes."""
    parser.addoption(
        "--soak-seconds", type=float, default=600.0, help="how long the soak test takes"
    )


@pytest.fixture(scope="session", autouse=True)
def signals_reach_children() -> Iterator[None]:
    """Let tests send signals even where the run itself was started with them ignored.

    A process started by `nohup`, or in the background of a script, ignores SIGHUP or SIGINT, and
    so do its children.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if before[signal.SIGINT] is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices take seven times as long when several threads share them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_world(tmp_path_factory: pytest.TempPathFactory) -> MakeWorld:
    """Return the world of a family; written when first asked for."""
    worlds: dict[str, World] = {}

    def make(family: str) -> World:
        if family not in worlds:
            worlds[family] = build_world(family, tmp_path_factory.mktemp(family))
        return worlds[family]

    return make


@pytest.fixture(scope="session")
def llama(make_world: MakeWorld) -> World:
    """Return the tiny Llama model and its adapters."""
    return make_world("llama")


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """Return a function that serves a world: `with start_server(world, *flags) as server`."""

    def start(world: World, *flags: str) -> AbstractContextManager[Server]:
        return serve(world, tmp_path_factory.mktemp("server") / "server.log", flags)

    return start


@pytest.fixture(scope="session")
def managed(llama: World, start_server: StartServer) -> Iterator[httpx.Client]:
    """Return a client of a server that serves a00 and a01 and may load everything of the world."""
    flags = ["--adapter-root", str(llama.folder), "--max-loras", "4", "--max-lora-rank", "32"]
    with start_server(llama, *llama.lora_modules("a00", "a01"), *flags) as server:
        yield server.http
