"""Starts `lora-server serve` as users do, waits until it answers, and ends it by its id."""

from __future__ import annotations

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
    from pathlib import Path

    from support.worlds import World

BASE_NAME = "tiny"
"""Name of the base model in every server of the tests."""

READY_WITHIN_S = 120.0
END_WITHIN_S = 30.0
_POLL_S = 0.05
_ADDRESS = re.compile(r"Serving .* on (http://\S+)")


def command(*arguments: str) -> list[str]:
    """Return a command line of the program under test, cut off from any hub.

    One thread an operator: with tiny models the others would only wait for each other.
    """
    program = [sys.executable, "-m", "lora_server.cli.main"]
    return ["env", "HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=1", *program, *arguments]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running service."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def metric(self, name: str, **labels: str) -> float:
        """Sum the samples of a metric that carry the labels; fail when there is none."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text
        found = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, f"no metric {name} {labels} in:\n{text}"
        return sum(found)

    def wait_for(self, condition: Callable[[], bool], *, within_s: float = 20.0) -> bool:
        """Ask until the condition holds; say whether it did in time."""
        deadline = time.monotonic() + within_s
        while not (holds := condition()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return holds

    def stop(self, sig: signal.Signals = signal.SIGINT) -> int:
        """Signal the process, wait for its end and return its exit status."""
        self.process.send_signal(sig)
        return self.process.wait(END_WITHIN_S)


@contextmanager
def serve(world: World, log: Path, flags: Sequence[str]) -> Iterator[Server]:
    """Serve a world's base model in float32; what else is in `flags`.

    The end is part of every test: SIGINT must end the process with status 0.
    """
    arguments = [
        *("serve", str(world.base), "--served-model-name", BASE_NAME),
        *("--port", "0", "--dtype", "float32", "--num-threads", "1", *flags),
    ]
    with running(arguments, log) as server:
        yield server
        if server.process.poll() is None:
            status = server.stop()
            assert status == 0, f"exit status {status} after SIGINT:\n{log.read_text()}"


@contextmanager
def running(arguments: Sequence[str], log: Path) -> Iterator[Server]:
    """Run the program until it answers; kill it in the end if it is still there."""
    with log.open("wb") as stream:
        process = subprocess.Popen(command(*arguments), stdout=stream, stderr=stream)
        try:
            yield Server(url=_wait_until_ready(process, log), process=process, log=log)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(END_WITHIN_S)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address once `/health` answers 200."""
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        text = log.read_text(errors="replace")
        assert process.poll() is None, f"the server ended with {process.returncode}:\n{text}"
        if match := _ADDRESS.search(text):
            url = match.group(1)
            httpx.get(f"{url}/health", timeout=10).raise_for_status()
            return url
        time.sleep(_POLL_S)
    raise AssertionError(f"not ready after {READY_WITHIN_S} s:\n{log.read_text()}")


def run_to_end(*arguments: str, within_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run the program, which is expected to end by itself."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=within_s, check=False
    )
