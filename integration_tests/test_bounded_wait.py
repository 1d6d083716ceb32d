"""More adapters than slots: everybody starts within a bound, and nobody blocks who has room.

The bound is `--max-adapter-wait` and the turns of those ahead, counted in steps. What a step takes
is read from the streams that run meanwhile, so that a slow machine has a longer bound.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import httpx
from support.requests import PROMPT, body, complete, expected
from support.server import BASE_NAME

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence

    from support.fixture_types import StartServer
    from support.server import Server
    from support.worlds import World

WAIT_S = 0.3
TURN_STEPS = 40
"""Steps that may pass beyond the wait: the turn of the adapter that makes room, a slot being
written, and the request's own prompt are five here; the rest is what a shared machine adds."""
REPEATS = 50
NUM_HOT_TOKENS = 60


@dataclass(slots=True, kw_only=True)
class Hot:
    """Clients that never stop asking for the same adapters, three for each."""

    client: httpx.AsyncClient
    right: dict[str, tuple[int, ...]]
    """Answers by adapter."""
    gaps_s: list[float] = field(default_factory=list)
    """Times between two tokens of a stream."""
    wrong: list[str] = field(default_factory=list)
    num_tokens: int = 0
    is_over: bool = False

    async def run(self) -> None:
        """Ask until it is over."""
        await asyncio.gather(*(self._loop(name) for name in list(self.right) * 3))

    async def _loop(self, name: str) -> None:
        while not self.is_over:
            tokens: list[int] = []
            last_s = 0.0
            async for token_ids in stream(self.client, name, NUM_HOT_TOKENS):
                now_s = time.monotonic()
                if tokens:
                    self.gaps_s.append(now_s - last_s)
                last_s = now_s
                tokens += token_ids
            self.num_tokens += len(tokens)
            if tuple(tokens) != self.right[name]:
                self.wrong.append(f"{name}: {tokens}")


async def stream(
    client: httpx.AsyncClient, name: str, num_tokens: int
) -> AsyncGenerator[list[int]]:
    """Yield the tokens of a stream as they come."""
    content = body(name, stream=True, max_tokens=num_tokens)
    async with client.stream("POST", "/v1/completions", json=content) as reply:
        lines = cast("AsyncGenerator[str]", reply.aiter_lines())
        async with aclosing(lines):
            async for line in lines:
                if line.startswith("data: {"):
                    choices = json.loads(line.removeprefix("data: "))["choices"]
                    yield [token_id for choice in choices for token_id in choice["token_ids"]]


async def ask(client: httpx.AsyncClient, model: str, **fields: Any) -> tuple[int, ...]:
    reply = await client.post("/v1/completions", json=body(model, **fields))
    return tuple(reply.raise_for_status().json()["choices"][0]["token_ids"])


def beside_hot(
    server: Server,
    world: World,
    names: Sequence[str],
    work: Callable[[httpx.AsyncClient, Hot], Coroutine[Any, Any, None]],
) -> Hot:
    """Do something while the named adapters are hot; return what the hot clients saw."""

    async def main() -> Hot:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            right = {name: expected(world, name, NUM_HOT_TOKENS) for name in names}
            hot = Hot(client=client, right=right)
            running = asyncio.create_task(hot.run())
            try:
                await asyncio.sleep(0.2)
                await work(client, hot)
            finally:
                hot.is_over = True
                await running
            return hot

    return asyncio.run(main())


def test_a_cold_adapter_starts_within_the_bound_fifty_times(
    llama: World, start_server: StartServer
) -> None:
    """S3: two hot adapters hold both slots for ever, as far as they are concerned."""
    cold = [name for name in llama.adapters if name not in ("a00", "a01")]
    waits_s: list[float] = []

    async def ask_for_cold_ones(client: httpx.AsyncClient, hot: Hot) -> None:
        for i in range(REPEATS):
            name = cold[i % len(cold)]
            start_s = time.monotonic()
            tokens: list[int] = []
            async for token_ids in stream(client, name, 4):
                if not tokens:
                    waits_s.append(time.monotonic() - start_s)
                tokens += token_ids
            if tuple(tokens) != expected(llama, name, 4):
                hot.wrong.append(f"{name}: {tokens}")

    flags = ["--max-loras", "2", "--max-lora-rank", "32", "--max-adapter-wait", str(WAIT_S)]
    with start_server(llama, *llama.lora_modules(), *flags) as server:
        hot = beside_hot(server, llama, ("a00", "a01"), ask_for_cold_ones)

    assert hot.wrong == []
    assert len(waits_s) == REPEATS
    step_s = statistics.quantiles(hot.gaps_s, n=100)[94]
    assert max(waits_s) <= WAIT_S + TURN_STEPS * step_s, (sorted(waits_s)[-5:], step_s)


def test_c42_with_one_slot_the_other_adapter_starts_within_the_bound_and_costs_little(
    llama: World, start_server: StartServer
) -> None:
    waits_s: list[float] = []
    alone: list[int] = []

    async def ask_for_b(client: httpx.AsyncClient, hot: Hot) -> None:
        before = hot.num_tokens
        await asyncio.sleep(2.0)
        alone.append(hot.num_tokens - before)
        before = hot.num_tokens
        end_s = time.monotonic() + 2.0
        while time.monotonic() < end_s:
            start_s = time.monotonic()
            assert await ask(client, "a09", max_tokens=1) == expected(llama, "a09", 1)
            waits_s.append(time.monotonic() - start_s)
        alone.append(hot.num_tokens - before)

    flags = ["--max-loras", "1", "--max-lora-rank", "32", "--max-adapter-wait", str(WAIT_S)]
    with start_server(llama, *llama.lora_modules("a03", "a09"), *flags) as server:
        hot = beside_hot(server, llama, ("a03",), ask_for_b)

    assert hot.wrong == []
    step_s = statistics.quantiles(hot.gaps_s, n=100)[94]
    assert max(waits_s) <= WAIT_S + TURN_STEPS * step_s, (sorted(waits_s)[-3:], step_s)
    assert alone[1] >= 0.3 * alone[0], alone


def test_c41_base_rows_and_chunks_take_no_slot_and_a_third_adapter_waits(
    llama: World, start_server: StartServer
) -> None:
    """Two slots, chunks of 8 tokens, and so few KV blocks that sequences are preempted."""
    prompt = tuple(range(20, 52))  # four chunks
    choices = ("a03", "a09", BASE_NAME, "a07", "a03", BASE_NAME, "a05")
    right = {
        name: llama.oracle.greedy(None if name == BASE_NAME else name, prompt, 24).token_ids
        for name in choices
    }
    most = 0

    async def main(server: Server) -> list[tuple[int, ...]]:
        nonlocal most
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asked = [
                asyncio.create_task(ask(client, name, prompt=list(prompt), max_tokens=24))
                for name in choices * 4
            ]
            while not all(one.done() for one in asked):
                leased = await asyncio.to_thread(server.metric, "lora_server_adapter_slots_leased")
                most = max(most, int(leased))
                await asyncio.sleep(0.01)
            return [one.result() for one in asked]

    flags = ["--max-loras", "2", "--max-lora-rank", "32", "--max-num-batched-tokens", "8"]
    flags += ["--kv-cache-memory", str(12 * 16 * 2 * 2 * 2 * 16 * 4), "--max-adapter-wait", "0.1"]
    with start_server(llama, *llama.lora_modules("a03", "a05", "a07", "a09"), *flags) as server:
        answers = asyncio.run(main(server))
        preemptions = server.metric("vllm:num_preemptions_total")

    assert answers == [right[name] for name in choices * 4]
    assert preemptions > 0
    assert 0 < most <= 2
    assert "outside a forward pass" not in server.log.read_text()


def test_s8_a_base_request_finishes_while_every_slot_is_held_by_streams(
    llama: World, start_server: StartServer
) -> None:
    async def ask_the_base(client: httpx.AsyncClient, hot: Hot) -> None:
        for _ in range(10):
            assert await ask(client, BASE_NAME) == expected(llama, None)
        assert hot.wrong == []

    flags = ["--max-loras", "2", "--max-lora-rank", "32", "--max-adapter-wait", "60"]
    with start_server(llama, *llama.lora_modules("a00", "a01"), *flags) as server:
        hot = beside_hot(server, llama, ("a00", "a01"), ask_the_base)
        assert complete(server.http, "a00", prompt=list(PROMPT)) == expected(llama, "a00")

    assert hot.wrong == []
