"""Counters and histograms that are fed while requests run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from lora_server.metrics.scrape import OTHER_LABEL, StateCollector

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from lora_server.metrics.protocols import ScrapeState

BASE_LABEL: Final = "base"
"""Value of `adapter` for requests without one."""
WEIGHTED_LABEL: Final = "weighted_set"
"""Value of `adapter` for requests that combine several."""
OUTCOMES: Final = ("ok", "error", "cancelled")
"""How a request ended; `cancelled` is a client that left."""

_NOT_ADAPTERS: Final = frozenset({BASE_LABEL, WEIGHTED_LABEL})
_TTFT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TPOT_BUCKETS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
_DURATION_BUCKETS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class ServerMetrics:
    """The metrics of one service. Thread-safe, as the client library is."""

    def __init__(self, *, max_adapter_labels: int = 100) -> None:
        """Make the metrics.

        Args:
            max_adapter_labels: adapters with series of their own; the others share `other`.
        """
        self._registry = CollectorRegistry()
        self._max_labels = max_adapter_labels
        self._named: dict[str, None] = {}
        self.requests = Counter(
            "lora_server_requests",
            "Requests that ended, by how: ok, error, cancelled.",
            ["adapter", "outcome"],
            registry=self._registry,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of the prompts.")
        self.generated_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.queue = self._histogram(
            "queue_time", "From the request to the first step that works on it.", _TTFT_BUCKETS_S
        )
        self.ttft = self._histogram(
            "time_to_first_token", "From the request to its first token.", _TTFT_BUCKETS_S
        )
        self.tpot = self._histogram(
            "time_per_output_token", "Between two tokens of a sequence, mean.", _TPOT_BUCKETS_S
        )
        self.duration = self._histogram(
            "request_duration", "From the request to its last token.", _DURATION_BUCKETS_S
        )

    def label(self, name: str) -> str:
        """Return the value of `adapter` for a name: itself, or `other` beyond the limit."""
        if name in _NOT_ADAPTERS or name in self._named:
            return name
        if len(self._named) >= self._max_labels:
            return OTHER_LABEL
        self._named[name] = None
        return name

    def render(self, state: ScrapeState) -> bytes:
        """Return all metrics in Prometheus' text format, without adapters that are gone."""
        served = {adapter.name for adapter in state.adapters}
        for name in [name for name in self._named if name not in served]:
            self._forget(name)
        scrape = CollectorRegistry()
        scrape.register(StateCollector(state, tuple(self._named), self._max_labels))
        return generate_latest(self._registry) + generate_latest(scrape)

    def _forget(self, name: str) -> None:
        del self._named[name]
        for outcome in OUTCOMES:
            self.requests.remove(name, outcome)
        for metric in (
            self.prompt_tokens,
            self.generated_tokens,
            self.queue,
            self.ttft,
            self.tpot,
            self.duration,
        ):
            metric.remove(name)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"lora_server_{name}", text, ["adapter"], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets_s: Sequence[float]) -> Histogram:
        return Histogram(
            f"lora_server_{name}_seconds",
            text,
            ["adapter"],
            buckets=buckets_s,
            registry=self._registry,
        )


class RequestTimer:
    """Measures one request. Enter it when the request is handed over, leave it at its end."""

    def __init__(
        self,
        metrics: ServerMetrics,
        adapter: str,
        *,
        clock: Callable[[], float],
        num_prompt_tokens: int,
        num_sequences: int,
    ) -> None:
        self._metrics = metrics
        self._adapter = adapter
        self._clock = clock
        self._num_prompt_tokens = num_prompt_tokens
        self._num_sequences = num_sequences
        self._num_tokens = 0
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
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        label = self._metrics.label(self._adapter)
        self._metrics.requests.labels(label, _outcome(kind)).inc()
        self._metrics.prompt_tokens.labels(label).inc(self._num_prompt_tokens)
        self._metrics.generated_tokens.labels(label).inc(self._num_tokens)
        if self._first_s is None and not self._is_answered:
            return
        if self._admitted_s is not None:
            self._metrics.queue.labels(label).observe(max(self._admitted_s - self._start_s, 0.0))
        self._metrics.duration.labels(label).observe(self._clock() - self._start_s)
        if self._first_s is None:
            return
        self._metrics.ttft.labels(label).observe(self._first_s - self._start_s)
        num_gaps = self._num_tokens / self._num_sequences - 1
        if num_gaps > 0:
            self._metrics.tpot.labels(label).observe((self._last_s - self._first_s) / num_gaps)


def _outcome(kind: type[BaseException] | None) -> str:
    """Say how a request ended; a closed generator or a cancelled task is a client that left."""
    if kind is None:
        return "ok"
    return "error" if issubclass(kind, Exception) else "cancelled"
