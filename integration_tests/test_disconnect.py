"""Clients that leave and servers that are told to end: nothing stays behind, nobody hangs."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from support.requests import PROMPT, body, complete

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.fixture_types import StartServer
    from support.server import Server
    from support.worlds import World

NUM_TOKENS = 200
LONG: dict[str, Any] = {"max_tokens": NUM_TOKENS, "n": 8, "temperature": 1, "seed": 1}


@pytest.fixture(scope="module")
def server(llama: World, start_server: StartServer) -> Iterator[Server]:
    with start_server(llama, *llama.lora_modules("a05", "a11"), "--max-loras", "2") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


# An iterator over a stream's lines is kept in a name: closing it closes the connection.


def is_idle(server: Server) -> bool:
    """Whether no request holds anything."""
    held = ("vllm:num_requests_running", "vllm:num_requests_waiting", "lora_server_kv_blocks_used")
    return all(server.metric(name) == 0 for name in (*held, "lora_server_adapter_slots_leased"))


def test_a_client_that_leaves_a_stream_frees_its_blocks_and_its_adapter(
    server: Server, client: httpx.Client
) -> None:
    before = server.metric("lora_server_generation_tokens_total", adapter="a05")

    with client.stream("POST", "/v1/completions", json=body("a05", stream=True, **LONG)) as stream:
        first = stream.iter_lines()
        next(first)
        assert server.metric("lora_server_kv_blocks_used") > 0
        assert server.metric("lora_server_adapter_slots_leased") == 1

    assert server.wait_for(lambda: is_idle(server)), server.log.read_text()
    generated = server.metric("lora_server_generation_tokens_total", adapter="a05") - before
    assert generated < NUM_TOKENS * 8
    assert server.metric("lora_server_requests_total", adapter="a05", outcome="cancelled") == 1


def test_a_client_that_leaves_before_its_reply_frees_its_blocks_and_its_adapter(
    server: Server,
) -> None:
    with (
        httpx.Client(base_url=server.url, timeout=httpx.Timeout(60, read=0.3)) as impatient,
        pytest.raises(httpx.ReadTimeout),
    ):
        impatient.post("/v1/completions", json=body("a11", **LONG))

    assert server.wait_for(lambda: is_idle(server)), server.log.read_text()
    assert server.metric("lora_server_requests_total", adapter="a11", outcome="cancelled") == 1


def test_a_client_that_leaves_does_not_disturb_the_others(
    llama: World, server: Server, client: httpx.Client
) -> None:
    expected = llama.oracle.greedy("a11", PROMPT, 120).token_ids

    with client.stream("POST", "/v1/completions", json=body("a05", stream=True, **LONG)) as leaving:
        first = leaving.iter_lines()
        next(first)
        with client.stream(
            "POST", "/v1/completions", json=body("a11", stream=True, max_tokens=120)
        ) as staying:
            lines = staying.iter_lines()
            token_ids = _token_ids(next(lines))
            leaving.close()
            for line in lines:
                token_ids += _token_ids(line)

    assert tuple(token_ids) == expected
    assert server.wait_for(lambda: is_idle(server))


def test_the_same_adapter_answers_after_its_request_was_cancelled(
    llama: World, client: httpx.Client
) -> None:
    with client.stream("POST", "/v1/completions", json=body("a05", stream=True, **LONG)) as stream:
        first = stream.iter_lines()
        next(first)

    assert complete(client, "a05", max_tokens=24) == (
        llama.oracle.greedy("a05", PROMPT, 24).token_ids
    )


def test_ctrl_c_ends_running_requests_and_the_exit_status_is_0(
    llama: World, start_server: StartServer
) -> None:
    replies: list[httpx.Response] = []

    with (
        start_server(llama, *llama.lora_modules("a05")) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body("a05", stream=True, **LONG)) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        waiting = threading.Thread(
            target=lambda: replies.append(
                httpx.post(f"{server.url}/v1/completions", json=body(**LONG), timeout=60)
            )
        )
        waiting.start()
        assert server.wait_for(lambda: server.metric("vllm:num_requests_running") == 16)
        started = time.monotonic()
        assert server.stop() == 0, server.log.read_text()
        took_s = time.monotonic() - started
        rest = [line for line in lines if line]
        waiting.join(30)

    assert rest[-1] == "data: [DONE]"
    endings = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in rest[:-1]]
    assert [reason for reason in endings if reason is not None] == ["abort"] * 8
    assert {choice["finish_reason"] for choice in replies[0].json()["choices"]} == {"abort"}
    assert took_s < 10
    assert "Traceback" not in server.log.read_text()


def _token_ids(line: str) -> list[int]:
    if not line.startswith("data: {"):
        return []
    token_ids: list[int] = json.loads(line[6:])["choices"][0]["token_ids"]
    return token_ids
