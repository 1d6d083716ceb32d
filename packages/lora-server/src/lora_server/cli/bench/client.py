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

from lora_server.cli.bench.connection import ConnectionFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lora_server.cli.bench.connection import LoadClient

_OK = 200
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
    client: LoadClient,
    body: dict[str, Any],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Answer:
    """Send `body` to `/v1/completions` as a stream and time its events.

    A refusal, a broken stream or an error event is in `Answer.error`, never raised.
    """
    model = str(body["model"])
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = _Events(clock)
    try:
        reply = await client.post("/v1/completions", request, events.add)
    except ConnectionFailedError as error:
        return Answer(model=model, error=events.error or f"ConnectionFailedError: {error}")
    if reply.status != _OK:
        text = events.rest.decode(errors="replace")
        return Answer(model=model, error=f"{reply.status}: {error_text(text)}")
    if events.error is not None:
        return Answer(model=model, error=events.error)
    if not events.is_done:
        return Answer(model=model, error="the stream ended without [DONE]")
    return _finished(model, events.times_s, clock() - events.start_s, events.last)


class _Events:
    """The events of one reply; lines may be cut anywhere by the network."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.start_s = clock()
        self.times_s: list[float] = []
        """When each event with text arrived."""
        self.last: bytes | None = None
        """The newest event, which may hold the usage."""
        self.rest = b""
        """The beginning of a line; of a refusal all there is."""
        self.error: str | None = None
        self.is_done = False

    def add(self, status: int, data: bytes) -> None:
        """Take a piece of the body."""
        self.rest += data
        if status != _OK:
            return
        *lines, self.rest = self.rest.split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                self._note(line.removeprefix(_DATA).strip())

    def _note(self, event: bytes) -> None:
        if self.error is not None:
            return
        if event == b"[DONE]":
            self.is_done = True
        elif event.startswith(b'{"error"'):
            self.error = error_text(event.decode(errors="replace"))
        else:
            self.last = event
            if not _NO_CHOICES.search(event):
                self.times_s.append(self._clock() - self.start_s)


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
