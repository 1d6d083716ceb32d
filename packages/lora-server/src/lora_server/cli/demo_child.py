"""The demo's service: a child process that is started like any other and always ended."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
from rich.console import Console

from lora_server.errors import StartupError
from lora_server.options import environment_without_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import FrameType

_START_S = 300
"""Bound on loading the model and warming up, on a slow disk."""
_END_S = 15
"""Bound on an orderly end; then the child is killed."""
_POLL_S = 0.2


class ServeChild:
    """A running `lora-server serve`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def wait_until_ready(self, base_url: str, *, timeout_s: float = _START_S) -> None:
        """Ask `/health` until it answers 200.

        Raises:
            StartupError: when the child ends before, or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        with (
            httpx.Client(base_url=base_url, timeout=5.0, trust_env=False) as client,
            Console(stderr=True).status("starting the service"),
        ):
            while time.monotonic() < deadline:
                status = self._process.poll()
                if status is not None:
                    raise StartupError([f"the service ended while it started, status {status}"])
                if _is_healthy(client):
                    return
                time.sleep(_POLL_S)
        raise StartupError([f"the service was not ready after {timeout_s:g} s"])

    def wait(self) -> int:
        """Wait until the child ends by itself and return its exit status."""
        return self._process.wait()

    def end(self) -> None:
        """Ask the child to end, and kill it when it does not."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(_END_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            # a second Ctrl-C does not wait, and leaves nothing behind either
            self._process.kill()
            self._process.wait()


@contextmanager
def serve_child(model: Path, adapters: Mapping[str, Path], *, port: int) -> Iterator[ServeChild]:
    """Start the service on a loopback port and end it when the block is left.

    SIGTERM leaves the block like Ctrl-C does: as `KeyboardInterrupt`.
    """
    with run_child(serve_command(model, adapters, port=port)) as child:
        yield child


@contextmanager
def run_child(command: Sequence[str]) -> Iterator[ServeChild]:
    """Run a command as `serve_child` does."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        # no variable may change what the demo shows: its options are all flags
        process = subprocess.Popen(command, env=environment_without_options())  # noqa: S603
        child = ServeChild(process)
        try:
            yield child
        finally:
            child.end()
    finally:
        signal.signal(signal.SIGTERM, before)


def serve_command(model: Path, adapters: Mapping[str, Path], *, port: int) -> list[str]:
    """Return the command line of the child."""
    modules = [json.dumps({"name": name, "path": str(path)}) for name, path in adapters.items()]
    return [
        *(sys.executable, "-m", "lora_server.cli.main", "serve", str(model)),
        *("--served-model-name", model.name, "--host", "127.0.0.1", "--port", str(port)),
        *("--log-level", "warning", "--lora-modules", *modules),
    ]


def free_port() -> int:
    """Return a loopback port that nobody listens on at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _is_healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt
