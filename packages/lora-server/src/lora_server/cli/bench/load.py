"""Runs a load test: warms up each model, sends the requests as planned, bounded in count and time.

Knows nothing of how the answers are summed up.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lora_server.cli.bench.client import Answer, error_text, stream_completion
from lora_server.cli.bench.connection import ConnectionFailedError, LoadClient
from lora_server.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lora_server.cli.bench.workload import PlannedRequest

_WARM_UP_TOKENS = 4
_OK = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """How requests are sent."""

    base_url: str
    """Address of the server, without `/v1`."""
    api_key: str | None
    max_concurrency: int
    """Most requests in flight, at least 1."""
    ignore_eos: bool
    """Ask for exactly the length of each answer."""
    timeout_s: float
    """Bound on the whole test, warm-up included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """All answers and how long the test took."""

    answers: tuple[Answer, ...]
    """One for each planned request; those cut off by the bound have an error."""
    duration_s: float
    """From the first request to the last answer, without the warm-up."""


def open_client(settings: LoadSettings) -> LoadClient:
    """Return a client without limits of its own and without a proxy."""
    return LoadClient(settings.base_url, api_key=settings.api_key, timeout_s=settings.timeout_s)


async def first_model(client: LoadClient) -> str:
    """Return the first name of `/v1/models`, which is the base.

    Raises:
        StartupError: when the server cannot be reached or lists nothing.
    """
    try:
        status, body = await client.get("/v1/models")
    except ConnectionFailedError as error:
        raise StartupError([f"{client.base_url} cannot be reached: {error}"]) from error
    if status != _OK:
        text = error_text(body.decode(errors="replace"))
        raise StartupError([f"/v1/models: {status}: {text}"])
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise StartupError(["/v1/models lists no model"]) from error


async def warm_up(
    client: LoadClient,
    requests: Sequence[PlannedRequest],
    settings: LoadSettings,
    *,
    num_requests: int = 0,
) -> None:
    """Load every adapter by a short request for each model, then send requests as in the test.

    Args:
        client: made by `open_client`.
        requests: of the test to come.
        settings: how to send them.
        num_requests: how many of them to send before the test, from the first on, again and again
            where there are fewer, without waiting for their times.

    Raises:
        StartupError: naming every model that does not answer.
    """
    by_model = {request.model: request for request in reversed(requests)}
    shorts = [
        replace(request, output_len=min(request.output_len, _WARM_UP_TOKENS))
        for request in by_model.values()
    ]
    problems = []
    for short in shorts:
        answer = await stream_completion(client, _body(short, settings))
        if answer.error is not None:
            problems.append(f"warm-up of {short.model!r} failed: {answer.error}")
    if problems:
        raise StartupError(problems)
    full = itertools.islice(itertools.cycle(requests), num_requests)
    at_once = [replace(request, arrival_s=0.0) for request in full]
    if at_once:
        await send_all(client, at_once, settings, timeout_s=settings.timeout_s)


async def send_all(
    client: LoadClient,
    requests: Sequence[PlannedRequest],
    settings: LoadSettings,
    *,
    timeout_s: float,
    on_answer: Callable[[], None] = lambda: None,
) -> LoadResult:
    """Send every request no earlier than planned and collect the answers.

    Args:
        client: made by `open_client`.
        requests: by arrival.
        settings: how to send them.
        timeout_s: after this many seconds the rest is given up.
        on_answer: called after each answer, for progress.
    """
    gate = asyncio.Semaphore(settings.max_concurrency)
    start = time.perf_counter()

    async def send(request: PlannedRequest) -> Answer:
        await asyncio.sleep(max(0.0, start + request.arrival_s - time.perf_counter()))
        async with gate:
            sent_s = time.perf_counter() - start
            answer = await stream_completion(client, _body(request, settings))
        on_answer()
        return replace(answer, sent_s=sent_s)

    tasks = [asyncio.create_task(send(request)) for request in requests]
    _, late = await asyncio.wait(tasks, timeout=timeout_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    duration = time.perf_counter() - start
    cut = f"no answer within the {settings.timeout_s:g} s of --timeout"
    answers = tuple(
        replace(
            Answer(model=request.model, error=cut) if task in late else task.result(),
            input_tokens=len(request.prompt),
            asked_tokens=request.output_len,
        )
        for task, request in zip(tasks, requests, strict=True)
    )
    return LoadResult(answers=answers, duration_s=duration)


def _body(request: PlannedRequest, settings: LoadSettings) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": request.model,
        "prompt": list(request.prompt),
        "max_tokens": request.output_len,
        "temperature": 0,
    }
    # OpenAI's own service refuses the field, so it is left out when it is not wanted
    return {**body, "ignore_eos": True} if settings.ignore_eos else body
