"""Short forms of the requests that several tests send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from support.server import BASE_NAME

if TYPE_CHECKING:
    import httpx

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
