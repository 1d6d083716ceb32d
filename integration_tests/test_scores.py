"""Prompt log-probabilities and weighted sets against PEFT, in one batch with other requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from support.requests import NUM_TOKENS, PROMPT, body
from support.server import BASE_NAME
from support.traffic import LOGPROB_TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from support.fixture_types import StartServer
    from support.oracle import Choice
    from support.server import Server
    from support.worlds import World

HEAD_ADAPTERS = ("a05", "a11", "a14")
"""Adapters that change `lm_head`: there every prompt position needs its own row."""

SETS: list[tuple[tuple[str, float], ...]] = [
    (("a03", 1.0),),
    (("a03", 0.5),),
    (("a01", 0.7), ("a12", -0.4)),
    (("a05", 0.5), ("a06", 0.5), ("a11", 0.25)),
    (("a13", 0.0), ("a09", 1.0)),
]


@pytest.fixture(scope="module")
def server(llama: World, start_server: StartServer) -> Iterator[Server]:
    # Chunks shorter than the prompts, so that their scores are put together from several steps.
    with start_server(llama, *llama.lora_modules(), "--max-num-batched-tokens", "20") as running:
        yield running


def ask_at_once(server: Server, bodies: Sequence[dict[str, Any]]) -> list[httpx.Response]:
    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            posts = (client.post("/v1/completions", json=content) for content in bodies)
            return list(await asyncio.gather(*posts))

    return asyncio.run(ask_all())


def test_prompt_logprobs_equal_peft_also_with_an_adapter_on_the_head(
    llama: World, server: Server
) -> None:
    prompts = {name: tuple(range(5 + i, 100, 3)) for i, name in enumerate(HEAD_ADAPTERS)}
    chosen = [*prompts.items(), (None, PROMPT), ("a02", PROMPT)]

    replies = ask_at_once(
        server,
        [
            body(name or BASE_NAME, prompt=list(prompt), echo=True, logprobs=1)
            for name, prompt in chosen
        ],
    )

    for (name, prompt), reply in zip(chosen, replies, strict=True):
        found = reply.raise_for_status().json()["choices"][0]["logprobs"]["token_logprobs"]
        answer = llama.oracle.greedy(name, prompt, NUM_TOKENS)
        expected = [*llama.oracle.prompt_logprobs(name, prompt), *answer.logprobs]
        assert found[0] is None
        assert found[1:] == pytest.approx(expected, abs=LOGPROB_TOLERANCE)


def test_weighted_sets_equal_peft_with_all_adapters_active(llama: World, server: Server) -> None:
    choices: list[Choice] = [*SETS, None, "a03", "a12"]

    replies = ask_at_once(server, [_body_for(choice) for choice in choices])

    for choice, reply in zip(choices, replies, strict=True):
        expected = llama.oracle.greedy(choice, PROMPT, NUM_TOKENS)
        found = reply.raise_for_status().json()["choices"][0]
        assert tuple(found["token_ids"]) == expected.token_ids, choice
        logprobs = found["logprobs"]["token_logprobs"]
        assert logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)


def test_every_reply_names_the_versions_that_answered(server: Server) -> None:
    replies = ask_at_once(server, [_body_for(choice) for choice in (None, "a03", SETS[2])])

    base, plain, weighted = (reply.headers["X-LoRA-Adapter"] for reply in replies)
    assert base == "base"
    assert plain.startswith("a03@")
    assert len(plain) == len("a03@") + 12
    assert [part.split("@")[0] for part in weighted.split(",")] == ["a01", "a12"]
    for reply in replies:
        assert reply.json()["system_fingerprint"].endswith(reply.headers["X-LoRA-Adapter"])


def _body_for(choice: Choice) -> dict[str, Any]:
    if choice is None or isinstance(choice, str):
        return body(choice or BASE_NAME, logprobs=0)
    members = [{"name": name, "scale": scale} for name, scale in choice]
    return body(BASE_NAME, logprobs=0, lora=members)
