"""Starts the program under test, waits until it answers, and ends it by its id.

`serve` forks each server from one process that has torch and transformers imported, because there
are dozens of servers and the import takes longer than most tests. What runs in the child is the
command line's own `main`. `run_to_end` starts the program as users do.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.context import ForkServerProcess
    from pathlib import Path

    from support.worlds import World

BASE_NAME = "tiny"
"""Name of the base model in every server of the tests."""

READY_WITHIN_S = 120.0
END_WITHIN_S = 30.0
_POLL_S = 0.05
_TIMEOUT_S = 60.0
_ADDRESS = re.compile(r"Serving .* on (http://[\w.:\[\]-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running service."""

    url: str
    process: ForkServerProcess
    log: Path
    http: httpx.Client
    """Connected to it: making a client takes longer than most answers here."""

    def metric(self, name: str, **labels: str) -> float:
        """Sum the samples of a metric that carry the labels; fail when there is no such metric."""
        text = self.http.get("/metrics").raise_for_status().text
        families = list(text_string_to_metric_families(text))
        known = {family.name for family in families}
        assert name.removesuffix("_total") in known, f"no metric {name} in:\n{text}"
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def wait_for(self, condition: Callable[[], bool], *, within_s: float = 20.0) -> bool:
        """Ask until the condition holds; say whether it did in time."""
        deadline = time.monotonic() + within_s
        while not (holds := condition()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return holds

    def signal(self, sig: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self.process.pid is not None
        os.kill(self.process.pid, sig)

    def stop(self) -> int | None:
        """Send SIGINT, as Ctrl-C does, and return the exit status; None when it goes on."""
        self.signal(signal.SIGINT)
        self.process.join(END_WITHIN_S)
        return self.process.exitcode


@contextmanager
def serve(world: World, log: Path, flags: Sequence[str]) -> Iterator[Server]:
    """Serve a world's base model in float32; what else is in `flags`.

    The end is part of every test: SIGINT must end the process with status 0. One thread an
    operator: with tiny models the others would only wait for each other.
    """
    arguments = [
        *("serve", str(world.base), "--served-model-name", BASE_NAME),
        *("--port", "0", "--dtype", "float32", "--num-threads", "1", *flags),
    ]
    with running(arguments, log) as server:
        yield server
        if server.process.is_alive():
            status = server.stop()
            assert status == 0, f"exit status {status} after SIGINT:\n{log.read_text()}"


@contextmanager
def running(arguments: Sequence[str], log: Path) -> Iterator[Server]:
    """Run the program until it answers; kill it in the end if it is still there."""
    process = _start(arguments, log)
    try:
        url = _wait_until_ready(process, log)
        with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as http:
            http.get("/health").raise_for_status()
            yield Server(url=url, process=process, log=log, http=http)
    finally:
        _end(process)


def fail_to_start(arguments: Sequence[str], log: Path) -> tuple[int | None, str]:
    """Run the program, which is expected to end by itself; return its status and its words."""
    process = _start(arguments, log)
    try:
        process.join(READY_WITHIN_S)
        return process.exitcode, log.read_text()
    finally:
        _end(process)


def _start(arguments: Sequence[str], log: Path) -> ForkServerProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lora_server.cli.build"])
    log.write_bytes(b"")
    process = context.Process(target=run_program, args=(list(arguments), str(log)), daemon=True)
    process.start()
    return process


def _end(process: ForkServerProcess) -> None:
    if process.is_alive():
        process.kill()
    process.join(END_WITHIN_S)


def run_program(arguments: list[str], log: str) -> None:
    """Be the program: with its command line, and with a file for both outputs."""
    from lora_server.cli.main import main

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    sys.exit(main(arguments))


def _wait_until_ready(process: ForkServerProcess, log: Path) -> str:
    """Return the address once the program says that it serves."""
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        text = log.read_text(errors="replace")
        assert process.exitcode is None, f"the server ended with {process.exitcode}:\n{text}"
        if match := _ADDRESS.search(text):
            return match.group(1)
        time.sleep(_POLL_S)
    raise AssertionError(f"not ready after {READY_WITHIN_S} s:\n{log.read_text()}")


def command(*arguments: str) -> list[str]:
    """Return a command line of the program, cut off from any hub."""
    return ["env", "HF_HUB_OFFLINE=1", sys.executable, "-m", "lora_server.cli.main", *arguments]


def run_to_end(*arguments: str, within_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run the program, which is expected to end by itself."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=within_s, check=False
    )
