"""Clients and processes that misbehave harm nobody else, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import httpx
import pytest
from support.requests import NUM_TOKENS, body, complete, expected, load, refusal, unload
from support.server import BASE_NAME, READY_WITHIN_S, command
from support.sockets import (
    connected,
    content_of,
    read_all,
    request_bytes,
    status_of,
    vanish,
)
from support.traffic import MIN_MARGIN

from lora_server.model.demo import BASE_NAME as DEMO_NAME
from lora_server.model.demo import prepare_base

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from support.fixture_types import StartServer
    from support.server import Server
    from support.worlds import World

NAMES = ("a00", "a01", "a03", "a04", "a09")
MAX_BODY_BYTES = 100_000
NUM_IDLE = 1000
NUM_STREAMS = 200
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server(llama: World, start_server: StartServer) -> Iterator[Server]:
    flags = [*llama.lora_modules(*NAMES), "--max-loras", "4", "--max-lora-rank", "32"]
    flags += ["--adapter-root", str(llama.folder), "--max-body-bytes", str(MAX_BODY_BYTES)]
    with start_server(llama, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def impatient(llama: World, start_server: StartServer) -> Iterator[Server]:
    """Return a server that waits for nobody longer than half a second."""
    flags = [*llama.lora_modules("a00"), "--max-lora-rank", "32"]
    flags += ["--adapter-root", str(llama.folder)]
    for name in ("request-header", "request-body", "response-write"):
        flags += [f"--{name}-timeout", "0.5"]
    with start_server(llama, *flags) as running:
        yield running


def is_idle(server: Server) -> bool:
    held = ("vllm:num_requests_running", "vllm:num_requests_waiting", "lora_server_kv_blocks_used")
    return all(server.metric(name) == 0 for name in (*held, "lora_server_adapter_slots_leased"))


def test_a_request_that_arrives_byte_by_byte_is_answered(llama: World, server: Server) -> None:
    with connected(server.url) as client:
        for byte in request_bytes(COMPLETIONS, body("a03")):
            client.sendall(bytes([byte]))
        answer = read_all(client)

    assert status_of(answer) == 200
    assert tuple(content_of(answer)["choices"][0]["token_ids"]) == expected(llama, "a03")


def test_clients_that_never_finish_are_sent_away_while_others_are_served(
    llama: World, impatient: Server
) -> None:
    request = request_bytes(COMPLETIONS, body())
    head = request.partition(b"\r\n\r\n")[0]
    parts = [b"", head[:10], head, head + b"\r\n\r\n", request[:-5]]
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(impatient.url)) for _ in parts]
        for client, part in zip(clients, parts, strict=True):
            client.sendall(part)

        assert complete(impatient.http) == expected(llama, None)
        answers = [read_all(client) for client in clients]

    assert [status_of(answer) if answer else None for answer in answers] == [
        *(None, None, None, 408, 408)
    ]
    assert content_of(answers[-1])["error"]["code"] == "request_timeout"


def test_a_client_that_drips_a_body_is_sent_away_all_the_same(impatient: Server) -> None:
    request = request_bytes(COMPLETIONS, body())
    end = request.index(b"\r\n\r\n") + 4
    stop = threading.Event()
    with connected(impatient.url) as client:
        client.sendall(request[:end])

        def drip() -> None:
            for byte in request[end:-1]:
                if stop.wait(0.05):
                    return
                try:
                    client.sendall(bytes([byte]))
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        answer = read_all(client)
        stop.set()
        dripping.join()

    assert status_of(answer) == 408


@pytest.mark.parametrize("is_chunked", [False, True], ids=["declared", "chunked"])
def test_a_body_that_is_too_large_is_refused(server: Server, is_chunked: bool) -> None:
    content = b'{"prompt": "' + b"a" * 4 * MAX_BODY_BYTES + b'"}'
    pieces = (content[i : i + 5000] for i in range(0, len(content), 5000))

    reply = httpx.post(
        server.url + COMPLETIONS,
        content=pieces if is_chunked else content,
        headers={"Content-Type": "application/json"},
    )

    error = refusal(reply, 413, "request_too_large")
    assert str(MAX_BODY_BYTES) in error["message"]
    assert reply.headers["connection"] == "close"


def test_a_body_that_goes_on_for_ever_is_cut_off(server: Server) -> None:
    head = request_bytes(COMPLETIONS, {}).partition(b"Content-Length")[0]
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    chunk = b"1000\r\n" + b"a" * 0x1000 + b"\r\n"
    with connected(server.url) as client:
        client.sendall(head)
        num_bytes = send_until_cut(client, chunk)

    assert num_bytes > MAX_BODY_BYTES
    assert is_idle(server)


def send_until_cut(client: socket.socket, chunk: bytes) -> int:
    """Send the same again and again until the server closes; return how much was sent."""
    num_bytes = 0
    try:
        while True:
            client.sendall(chunk)
            num_bytes += len(chunk)
    except ConnectionError:
        return num_bytes


def test_headers_without_an_end_are_refused(server: Server) -> None:
    replies = [
        httpx.get(f"{server.url}/v1/models", headers={"X-Long": "a" * 100_000}),
        httpx.get(f"{server.url}/v1/models", headers={f"X-{i}": "a" for i in range(200)}),
    ]

    for reply in replies:
        refusal(reply, 431, "headers_too_large")
    assert server.http.get("/v1/models").status_code == 200


@pytest.mark.parametrize("ending", ["reset", "half closed"])
def test_a_client_that_vanishes_leaves_nothing_running(server: Server, ending: str) -> None:
    long = body("a01", max_tokens=200, n=8, temperature=1.0, stream=True)
    before = server.metric("lora_server_requests_total", outcome="cancelled")
    with connected(server.url) as client:
        client.sendall(request_bytes(COMPLETIONS, long))
        assert client.recv(10)
        if ending == "reset":
            vanish(client)
        else:
            client.shutdown(socket.SHUT_WR)

        assert server.wait_for(lambda: is_idle(server))

    assert server.metric("lora_server_requests_total", outcome="cancelled") == before + 1


def test_a_client_that_stops_reading_a_stream_is_cut_off_and_holds_nothing(
    llama: World, impatient: Server
) -> None:
    """Its answer is far larger than every buffer between the two ends."""
    load(impatient.http, "held", llama.adapters["a04"]).raise_for_status()
    fields = {"max_tokens": 200, "n": 64, "temperature": 1.0, "logprobs": 20, "stream": True}
    with connected(impatient.url, receive_buffer=4096) as client:
        client.sendall(request_bytes(COMPLETIONS, body("held", **fields)))
        assert client.recv(10)
        assert complete(impatient.http) == expected(llama, None)
        unload(impatient.http, "held").raise_for_status()

        assert impatient.wait_for(lambda: is_idle(impatient))
        assert impatient.wait_for(
            lambda: impatient.metric("lora_server_adapter_bytes", tier="device") == 0
        )
        assert b"[DONE]" not in read_all(client)

    assert complete(impatient.http, "a00") == expected(llama, "a00")


def test_a_thousand_idle_connections_are_in_nobodys_way(llama: World, server: Server) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(connected(server.url)) for _ in range(NUM_IDLE)]

        assert complete(server.http, "a00") == expected(llama, "a00")
        for client in idle[::100]:
            client.sendall(request_bytes(COMPLETIONS, body("a03")))
        answers = [read_all(client) for client in idle[::100]]

    tokens = [tuple(content_of(answer)["choices"][0]["token_ids"]) for answer in answers]
    assert tokens == [expected(llama, "a03")] * 10
    assert server.wait_for(lambda: is_idle(server))


def clear_requests(world: World, count: int) -> list[tuple[str | None, tuple[int, ...]]]:
    """Return prompts whose greedy answers do not hang on rounding, with what answers them."""
    chance = random.Random(5)
    found: list[tuple[str | None, tuple[int, ...]]] = []
    while len(found) < count:
        name = chance.choice((*NAMES, None))
        prompt = tuple(chance.choices(range(2, 270), k=chance.randint(5, 40)))
        if world.oracle.greedy(name, prompt, NUM_TOKENS).margin >= MIN_MARGIN:
            found.append((name, prompt))
    return found


def test_two_hundred_streams_at_once_are_all_complete_and_right(
    llama: World, server: Server
) -> None:
    chosen = clear_requests(llama, NUM_STREAMS // 5)
    alone = [
        complete(server.http, name or BASE_NAME, prompt=list(prompt)) for name, prompt in chosen
    ]

    streamed = asyncio.run(stream_all(server.url, chosen * 5))

    assert streamed == alone * 5
    assert alone == [
        llama.oracle.greedy(name, prompt, NUM_TOKENS).token_ids for name, prompt in chosen
    ]
    assert server.wait_for(lambda: is_idle(server))


async def stream_all(
    url: str, requests: Sequence[tuple[str | None, tuple[int, ...]]]
) -> list[tuple[int, ...]]:
    """Open every stream before any is read, then read them all; return their tokens."""
    limits = httpx.Limits(max_connections=None)
    opened = asyncio.Barrier(len(requests))
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:

        async def ask(name: str | None, prompt: tuple[int, ...]) -> tuple[int, ...]:
            content = body(name or BASE_NAME, prompt=list(prompt), stream=True)
            async with client.stream("POST", COMPLETIONS, json=content) as reply:
                assert reply.status_code == 200
                assert reply.headers["x-lora-adapter"].split("@")[0] == (name or "base")
                await opened.wait()
                lines = [line async for line in reply.aiter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            return tuple(tokens_of(lines[:-1]))

        return list(await asyncio.gather(*(ask(*request) for request in requests)))


def tokens_of(lines: Sequence[str]) -> Iterator[int]:
    for line in lines:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        yield from choice["token_ids"]


def test_a_killed_conversion_of_the_demo_model_is_no_model_and_is_cleared_away(
    tmp_path: Path,
) -> None:
    real = prepare_base()
    environment = ["env", f"LORA_SERVER_CACHE_DIR={tmp_path}"]
    prepare = [*environment, *command("demo", "--prepare")]
    with subprocess.Popen(prepare, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert wait_for_folder(tmp_path)
        finally:
            process.send_signal(signal.SIGKILL)
    (key,) = tmp_path.iterdir()
    assert [path.name[:8] for path in key.iterdir()] == ["partial-"]
    # What somebody else has finished meanwhile; converting takes half a minute.
    (key / DEMO_NAME).symlink_to(real)

    done = subprocess.run(prepare, capture_output=True, text=True, timeout=60, check=True)

    assert [path.name for path in key.iterdir()] == [DEMO_NAME]
    assert str(key / DEMO_NAME) in done.stdout


def wait_for_folder(cache: Path) -> bool:
    """Wait until a conversion writes into a cache."""
    waiting = threading.Event()
    for _ in range(int(READY_WITHIN_S / 0.05)):
        if any(cache.glob("*/partial-*")):
            return True
        waiting.wait(0.05)
    return False
