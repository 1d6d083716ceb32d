"""RequestTimer: measures one request, and tells its numbers once it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    ERROR = "error"
    CANCELLED = "cancelled"
    """The client left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What was measured of one request; times in seconds."""

    adapter: str
    """Name of its adapter, or one of the labels that stand for none or several."""
    outcome: Outcome
    error: BaseException | None
    num_prompt_tokens: int
    num_cached_tokens: int
    """Of the prompt, those found in the prefix cache."""
    num_tokens: int
    """Generated, over all sequences."""
    queue_s: float | None
    """From the request to the first step that works on it; None when nothing came of it."""
    first_token_s: float | None
    """From the request to its first token; None without one."""
    token_gap_s: float | None
    """Between two tokens of a sequence, mean; None below two tokens."""
    duration_s: float
    """From the request to its end."""
    is_answered: bool
    """Whether there was any answer; durations of requests without one would say little."""


class RequestSink(Protocol):
    """Takes the numbers of each request as it ends."""

    def record(self, record: RequestRecord) -> None:
        """Take them. Called on the event loop's thread."""
        ...


class RequestTimer:
    """Measures one request. Enter it when the request is handed over, leave it at its end."""

    def __init__(
        self,
        sink: RequestSink,
        adapter: str,
        *,
        clock: Callable[[], float],
        num_prompt_tokens: int,
        num_sequences: int,
        on_end: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        """Measure for `sink`.

        Args:
            sink: gets the numbers.
            adapter: name of the adapter, or a label that stands for none or several.
            clock: seconds; the engine's clock.
            num_prompt_tokens: over all prompts.
            num_sequences: continuations, over all prompts.
            on_end: gets the numbers as well; None costs nothing.
        """
        self._sink = sink
        self._adapter = adapter
        self._clock = clock
        self._num_prompt_tokens = num_prompt_tokens
        self._num_sequences = num_sequences
        self._on_end = on_end
        self._num_tokens = 0
        self._num_cached_tokens = 0
        self._start_s = 0.0
        self._admitted_s: float | None = None
        self._first_s: float | None = None
        self._last_s = 0.0
        self._is_answered = False

    def __enter__(self) -> Self:
        self._start_s = self._clock()
        return self

    def admitted(self, at_s: float | None) -> None:
        """Note when the engine began to work, on the same clock; the first time counts."""
        if self._admitted_s is None:
            self._admitted_s = at_s

    def add_cached_tokens(self, count: int) -> None:
        """Count prompt tokens that were found in the prefix cache."""
        self._num_cached_tokens += count

    def add_tokens(self, count: int) -> None:
        """Count tokens that have just been generated; an end without a token is none."""
        if count == 0:
            return
        self._num_tokens += count
        self._last_s = self._clock()
        if self._first_s is None:
            self._first_s = self._last_s

    def answered(self) -> None:
        """Note that the answer is there and that no tokens are generated for it."""
        self._is_answered = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        record = self._record(_outcome(kind), error)
        self._sink.record(record)
        if self._on_end is not None:
            self._on_end(record)

    def _record(self, outcome: Outcome, error: BaseException | None) -> RequestRecord:
        is_answered = self._is_answered or self._first_s is not None
        queue_s = None
        if is_answered and self._admitted_s is not None:
            queue_s = max(self._admitted_s - self._start_s, 0.0)
        return RequestRecord(
            adapter=self._adapter,
            outcome=outcome,
            error=error,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_tokens=self._num_tokens,
            queue_s=queue_s,
            first_token_s=None if self._first_s is None else self._first_s - self._start_s,
            token_gap_s=self._gap_s(),
            duration_s=self._clock() - self._start_s,
            is_answered=is_answered,
        )

    def _gap_s(self) -> float | None:
        num_gaps = self._num_tokens / self._num_sequences - 1
        if self._first_s is None or num_gaps <= 0:
            return None
        return (self._last_s - self._first_s) / num_gaps


def _outcome(kind: type[BaseException] | None) -> Outcome:
    """Say how a request ended; a closed generator or a cancelled task is a client that left."""
    if kind is None:
        return Outcome.OK
    return Outcome.ERROR if issubclass(kind, Exception) else Outcome.CANCELLED
