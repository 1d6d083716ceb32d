"""Short forms of the requests that several tests send."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from support.server import BASE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from support.oracle import Choice
    from support.worlds import World

PROMPT = tuple(range(20, 60, 3))
"""A prompt after which every adapter of every family answers differently."""

NUM_TOKENS = 8


def body(model: str | None = BASE_NAME, **fields: Any) -> dict[str, Any]:
    """Return the body of a greedy completion of `PROMPT`; fields override."""
    return {
        "model": model,
        "prompt": list(PROMPT),
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def complete(client: httpx.Client, model: str | None = BASE_NAME, **fields: Any) -> tuple[int, ...]:
    """Ask for a completion and return its tokens."""
    reply = client.post("/v1/completions", json=body(model, **fields))
    assert reply.status_code == 200, reply.text
    return tuple(reply.json()["choices"][0]["token_ids"])


def refusal(reply: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Check that a request was refused in the OpenAI API's shape and return the error."""
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert error["code"] == code, error
    return error


def expected(world: World, choice: Choice, num_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
    """Return PEFT's tokens after `PROMPT`."""
    return world.oracle.greedy(choice, PROMPT, num_tokens).token_ids


def streamed(reply: httpx.Response) -> Iterator[list[int]]:
    """Yield the tokens of each chunk. Keep the iterator: closing it closes the connection."""
    for line in reply.iter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                yield choice["token_ids"]


def load(client: httpx.Client, name: str, path: Path | str, **fields: Any) -> httpx.Response:
    """Ask for an adapter to be loaded."""
    content = {"lora_name": name, "lora_path": str(path), **fields}
    return client.post("/v1/load_lora_adapter", json=content)


def unload(client: httpx.Client, name: str) -> httpx.Response:
    """Ask for an adapter to be forgotten."""
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def served(client: httpx.Client) -> list[str]:
    """Return the names of `/v1/models`."""
    return [card["id"] for card in client.get("/v1/models").raise_for_status().json()["data"]]
