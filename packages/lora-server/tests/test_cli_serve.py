"""The life of the service as a process: start order, readiness, signals, statuses.

The service is a small one; the process, the sockets and the signals are real.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import httpx
import pytest

from lora_server.cli.serve import bind_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SERVICE = '''
"""A service whose only answer is a stream that goes on until it is ended."""

import asyncio
import sys
import threading

from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lora_server.cli.serve import serve
from lora_server.errors import StartupError
from lora_server.options import resolve

MODE, PORT, DRAIN = sys.argv[1:4]


class Service:
    def __init__(self):
        print("built", file=sys.stderr, flush=True)
        routes = [
            Route("/health", self.health),
            Route("/stream", self.stream),
            Route("/finish", self.finish),
        ]
        self.app = Starlette(routes=routes)
        self.is_ready = False
        self.ended = threading.Event()
        self.finished = threading.Event()
        self.num_running = 0

    async def health(self, request):
        return Response(status_code=200 if self.is_ready else 503)

    async def stream(self, request):
        async def events():
            self.num_running += 1
            yield "data: first\\n\\n"
            while not self.ended.is_set() and not self.finished.is_set():
                await asyncio.sleep(0.01)
            if self.finished.is_set():
                yield "data: last\\n\\n"
            yield "data: [DONE]\\n\\n"
            self.num_running -= 1

        return StreamingResponse(events(), media_type="text/event-stream")

    async def finish(self, request):
        self.finished.set()
        return Response()

    def begin_drain(self):
        self.is_ready = False

    def warm_up(self):
        if MODE == "broken":
            raise RuntimeError("no kernel")
        self.is_ready = True

    def reload_keys(self):
        print("reloaded", file=sys.stderr, flush=True)

    def begin_shutdown(self):
        print("ending", file=sys.stderr, flush=True)
        if MODE != "stubborn":
            self.ended.set()

    def close(self):
        print("closed", file=sys.stderr, flush=True)


def build(config):
    if MODE == "refused":
        raise StartupError(["adapter a: rank 99", "adapter b: missing"])
    return Service()


options = {"model": "m", "port": PORT, "served_model_name": ["small"], "drain_timeout": DRAIN}
if MODE == "keys":
    options["api_key_file"] = "keys.yaml"
resolved = resolve(options, environ={})
try:
    sys.exit(serve(resolved, build))
except StartupError as error:
    print(*error.problems, sep="\\n", file=sys.stderr)
    sys.exit(1)
'''


class Process:
    """A service in a process of its own, with its stderr at hand."""

    def __init__(self, script: Path, mode: str, port: str, drain: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, str(script), mode, port, drain], stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append(line.rstrip())

    def wait_for(self, pattern: str, timeout: float = 20.0) -> re.Match[str]:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if found := re.search(pattern, line):
                    return found
            time.sleep(0.01)
        raise AssertionError((pattern, self.lines))

    def url(self) -> str:
        return self.wait_for(r"^Serving small on (http://127\.0\.0\.1:\d+)$")[1]

    def close(self) -> None:
        assert self.popen.stderr is not None
        self.popen.stderr.close()

    def end(self, timeout: float = 20.0) -> int:
        status = self.popen.wait(timeout)
        self.reader.join(timeout)
        return status


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    script = tmp_path / "service.py"
    script.write_text(SERVICE)
    processes: list[Process] = []

    def start_process(mode: str = "plain", port: str = "0", drain: str = "60") -> Process:
        processes.append(Process(script, mode, port, drain))
        return processes[-1]

    yield start_process
    for process in processes:
        if process.popen.poll() is None:
            process.popen.kill()
        process.end()
        process.close()


def test_a_free_port_is_printed_once_the_service_is_ready(start: Callable[..., Process]) -> None:
    process = start()

    answer = httpx.get(process.url() + "/health", trust_env=False)

    assert answer.status_code == 200
    assert sum(line.startswith("Serving") for line in process.lines) == 1
    assert any("--served-model-name" in line and "small" in line for line in process.lines)


def test_small_packets_are_sent_at_once() -> None:
    with bind_address("127.0.0.1", 0) as listener:
        # asyncio turns the delay off for sockets with this protocol only
        assert listener.proto == socket.IPPROTO_TCP


def test_connections_whose_other_end_vanished_are_noticed() -> None:
    with bind_address("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def test_a_hangup_reads_the_keys_again_and_ends_nothing(start: Callable[..., Process]) -> None:
    process = start("keys")
    url = process.url()

    process.popen.send_signal(signal.SIGHUP)

    process.wait_for("^reloaded$")
    assert httpx.get(url + "/health", trust_env=False).status_code == 200


def test_a_hangup_ends_a_service_without_a_file_of_keys(start: Callable[..., Process]) -> None:
    process = start()
    process.url()

    process.popen.send_signal(signal.SIGHUP)

    assert process.end() == -signal.SIGHUP


@pytest.mark.parametrize(
    ("number", "drain"), [(signal.SIGINT, "60"), (signal.SIGTERM, "0"), (signal.SIGTERM, "0.3")]
)
def test_a_signal_ends_open_streams_and_the_status_is_0(
    start: Callable[..., Process], number: signal.Signals, drain: str
) -> None:
    process = start(drain=drain)
    with httpx.stream("GET", process.url() + "/stream", trust_env=False, timeout=20) as response:
        lines = response.iter_lines()
        assert next(lines) == "data: first"
        begin = time.monotonic()

        process.popen.send_signal(number)
        rest = [line for line in lines if line]

    assert rest == ["data: [DONE]"]
    assert process.end() == 0
    assert time.monotonic() - begin < 4
    assert process.lines.index("ending") < process.lines.index("closed")
    assert not any("Traceback" in line for line in process.lines)


def test_after_sigterm_a_running_stream_finishes_and_new_requests_are_told(
    start: Callable[..., Process],
) -> None:
    process = start()
    url = process.url()
    with httpx.stream("GET", url + "/stream", trust_env=False, timeout=20) as response:
        lines = response.iter_lines()
        next(lines)

        process.popen.send_signal(signal.SIGTERM)
        process.wait_for(r"Draining.* running=1 ")
        health = httpx.get(url + "/health", trust_env=False)
        httpx.get(url + "/finish", trust_env=False)
        rest = [line for line in lines if line]

    assert health.status_code == 503
    assert rest == ["data: last", "data: [DONE]"]
    assert process.end() == 0
    assert any(line.endswith("Drained") for line in process.lines)


def test_without_running_requests_sigterm_ends_at_once(start: Callable[..., Process]) -> None:
    process = start()
    process.url()

    process.popen.send_signal(signal.SIGTERM)

    assert process.end(timeout=10) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_wait_for_the_drain(
    start: Callable[..., Process], number: signal.Signals
) -> None:
    process = start()
    with httpx.stream("GET", process.url() + "/stream", trust_env=False, timeout=20) as response:
        lines = response.iter_lines()
        next(lines)
        process.popen.send_signal(signal.SIGTERM)
        process.wait_for("Draining")

        process.popen.send_signal(number)
        rest = [line for line in lines if line]

    assert rest == ["data: [DONE]"]
    assert process.end(timeout=10) == 0


def test_a_second_ctrl_c_does_not_wait_for_a_stream_that_goes_on(
    start: Callable[..., Process],
) -> None:
    process = start("stubborn")
    with httpx.stream("GET", process.url() + "/stream", trust_env=False, timeout=20) as response:
        lines = response.iter_lines()
        next(lines)
        process.popen.send_signal(signal.SIGINT)
        process.wait_for("^ending$")
        begin = time.monotonic()

        process.popen.send_signal(signal.SIGINT)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)

    assert process.end() == 0
    assert time.monotonic() - begin < 3
    assert "closed" in process.lines
    # the stream that was cut is told, the application's own end is not an error
    assert not any("lifespan" in line for line in process.lines)


def test_a_warm_up_that_fails_ends_the_service_with_status_1(start: Callable[..., Process]) -> None:
    process = start("broken")

    assert process.end() == 1
    assert any("no kernel" in line for line in process.lines)
    assert "closed" in process.lines
    assert not any(line.startswith("Serving") for line in process.lines)


def test_problems_of_the_build_are_all_printed_and_nothing_listens(
    start: Callable[..., Process],
) -> None:
    process = start("refused")

    assert process.end() == 1
    assert process.lines[-2:] == ["adapter a: rank 99", "adapter b: missing"]


def test_an_address_in_use_is_told_before_the_model_is_loaded(
    start: Callable[..., Process],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start(port=str(taken.getsockname()[1]))

        assert process.end() == 1

    assert any("cannot listen on 127.0.0.1" in line for line in process.lines)
    assert "built" not in process.lines
