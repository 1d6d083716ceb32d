"""One streamed completion, timed, with little work for each token.

Of the stream only the last event is parsed, for the server's own token count: on a small machine
the client shares the cores with what it measures.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

_DATA = b"data:"
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_MAX_MESSAGE = 300
"""Characters of a server's answer that are kept as an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back for one request."""

    model: str
    token_times_s: tuple[float, ...] = ()
    """When each event with text arrived, after the request was sent."""
    duration_s: float = 0.0
    """From sending to the end of the stream."""
    output_tokens: int = 0
    """As the server counts; the number of events when it does not say."""
    is_counted_by_server: bool = False
    error: str | None = None
    """Why the request failed; then the rest does not count."""
    sent_s: float = 0.0
    """When it was sent, after the start of the test."""
    input_tokens: int = 0
    """Length of its prompt."""
    asked_tokens: int = 0
    """Tokens asked for."""

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.token_times_s[0] if self.token_times_s else self.duration_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for answers of one token."""
        if self.output_tokens < 2:  # noqa: PLR2004 - one token has no next
            return None
        return (self.token_times_s[-1] - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Pauses between events."""
        return [after - before for before, after in itertools.pairwise(self.token_times_s)]


async def stream_completion(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Answer:
    """Send `body` to `/v1/completions` as a stream and time its events.

    A refusal, a broken stream or an error event is in `Answer.error`, never raised.
    """
    model = str(body["model"])
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    start = clock()
    times: list[float] = []
    usage: bytes | None = None
    is_done = False
    try:
        async with client.stream("POST", "/v1/completions", json=request) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                return Answer(model=model, error=f"{response.status_code}: {error_text(text)}")
            async for event in _events(response):
                if event == b"[DONE]":
                    is_done = True
                elif event.startswith(b'{"error"'):
                    return Answer(model=model, error=error_text(event.decode(errors="replace")))
                elif _NO_CHOICES.search(event):
                    usage = event
                else:
                    times.append(clock() - start)
                    usage = event
    except httpx.HTTPError as error:
        return Answer(model=model, error=f"{type(error).__name__}: {error}".rstrip(": "))
    if not is_done:
        return Answer(model=model, error="the stream ended without [DONE]")
    return _finished(model, times, clock() - start, usage)


def error_text(text: str) -> str:
    """Return the message of an OpenAI-shaped error, or the beginning of the text."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text
    return str(message)[:_MAX_MESSAGE]


def _finished(model: str, times: list[float], duration: float, last: bytes | None) -> Answer:
    if not times:
        return Answer(model=model, error="the stream had no text")
    try:
        counted = json.loads(last or b"{}").get("usage") or {}
    except (ValueError, AttributeError):
        return Answer(model=model, error="the last event of the stream is not an object")
    tokens = counted.get("completion_tokens")
    return Answer(
        model=model,
        token_times_s=tuple(times),
        duration_s=duration,
        output_tokens=len(times) if tokens is None else int(tokens),
        is_counted_by_server=tokens is not None,
    )


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the data of each event; lines may be cut anywhere by the network."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                yield line.removeprefix(_DATA).strip()
