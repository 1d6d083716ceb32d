"""Requests that arrive at random times, for random adapters, and the check of their answers."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from support.oracle import NUM_TOP, Answer
from support.server import BASE_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.worlds import World

LOGPROB_TOLERANCE = 1e-4
"""What the answers may differ by; float32 rounding of these models is about 1e-5."""

MIN_MARGIN = 1e-3
"""Prompts with a closer decision are not used: there greedy decoding compares rounding errors."""

_TIMEOUT_S = 120.0
_NUM_STEMS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request to come."""

    adapter: str | None
    prompt: tuple[int, ...]
    num_tokens: int
    delay_s: float
    """When it is sent, from the start of the traffic."""


def plan_traffic(
    world: World, *, seed: int, num_requests: int = 32, within_s: float = 1.0
) -> list[Planned]:
    """Plan requests over all adapters and the base (one in five).

    Many prompts begin alike, under different adapters and the base: keys and values kept for one
    adapter must not answer for another. Half of them repeat an earlier request as a whole.
    """
    chance = random.Random(seed)
    vocab = range(2, 270)
    stems = [tuple(chance.choices(vocab, k=40)) for _ in range(_NUM_STEMS)]
    names = list(world.adapters)
    turns = names + names
    chance.shuffle(turns)
    planned: list[Planned] = []
    while len(planned) < num_requests:
        adapter = None if chance.random() < 0.2 else turns[len(planned) % len(turns)]
        stem = chance.choice(stems)[: chance.choice((0, 20, 40))]
        prompt = stem + tuple(chance.choices(vocab, k=chance.randint(1, 24)))
        if planned and chance.random() < 0.3:
            prompt = chance.choice(planned).prompt
        num_tokens = chance.randint(4, 24)
        if world.oracle.greedy(adapter, prompt, num_tokens).margin < MIN_MARGIN:
            continue
        planned.append(
            Planned(
                adapter=adapter,
                prompt=prompt,
                num_tokens=num_tokens,
                delay_s=chance.random() * within_s,
            )
        )
    return planned


def run_traffic(url: str, planned: Sequence[Planned]) -> list[dict[str, Any]]:
    """Send every request at its time and return the replies in the order of the plan."""
    return asyncio.run(_run(url, planned))


async def _run(url: str, planned: Sequence[Planned]) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits) as client:
        return list(await asyncio.gather(*(_send(client, request) for request in planned)))


async def _send(client: httpx.AsyncClient, planned: Planned) -> dict[str, Any]:
    await asyncio.sleep(planned.delay_s)
    reply = await client.post(
        "/v1/completions",
        json={
            "model": planned.adapter or BASE_NAME,
            "prompt": list(planned.prompt),
            "max_tokens": planned.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": NUM_TOP,
            "return_token_ids": True,
        },
    )
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    label = reply.headers["X-LoRA-Adapter"].split("@")[0]
    assert label == (planned.adapter or "base")
    return body


def differences(
    world: World, planned: Sequence[Planned], replies: Sequence[dict[str, Any]]
) -> list[str]:
    """Compare every reply with PEFT's answer for that adapter alone; one sentence a difference."""
    problems = []
    for number, (request, reply) in enumerate(zip(planned, replies, strict=True)):
        expected = world.oracle.greedy(request.adapter, request.prompt, request.num_tokens)
        choice = reply["choices"][0]
        where = f"request {number} ({request.adapter or 'base'}, {len(request.prompt)} tokens)"
        if tuple(choice["token_ids"]) != expected.token_ids:
            problems.append(f"{where}: {choice['token_ids']}, expected {expected.token_ids}")
            continue
        off = _largest_error(choice["logprobs"], expected)
        if not off <= LOGPROB_TOLERANCE:
            problems.append(f"{where}: log-probabilities differ by {off:.2e}")
    return problems


def _largest_error(found: dict[str, Any], expected: Answer) -> float:
    """Largest difference of the chosen tokens' and the best tokens' log-probabilities.

    Alternatives are compared by value: several tokens of this vocabulary read alike as text, and
    equal texts share a place in the reply, which therefore may hold fewer of them.
    """
    pairs = list(zip(found["token_logprobs"], expected.logprobs, strict=True))
    errors: list[float] = [abs(one - other) for one, other in pairs]
    for top, values in zip(found["top_logprobs"], expected.top, strict=True):
        errors += [min(abs(value - known) for known in values) for value in top.values()]
    return max(errors)
