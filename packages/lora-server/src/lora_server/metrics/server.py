"""Counters and histograms that are fed while requests run."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lora_server.metrics.labels import AdapterLabels
from lora_server.metrics.scrape import StateCollector
from lora_server.metrics.thrash import ThrashAlarm
from lora_server.metrics.timer import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lora_server.metrics.protocols import ScrapeState
    from lora_server.metrics.timer import RequestRecord

_TTFT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TPOT_BUCKETS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
_DURATION_BUCKETS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_LOAD_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class ServerMetrics:
    """The metrics of one service. Thread-safe, as the client library is."""

    def __init__(self, *, max_adapter_labels: int = 100, thrash: ThrashAlarm | None = None) -> None:
        """Make the metrics.

        Args:
            max_adapter_labels: adapters with series of their own; the others share `other`.
            thrash: read at each scrape; None never raises an alarm.
        """
        self.thrash = ThrashAlarm(0.0) if thrash is None else thrash
        self._registry = CollectorRegistry()
        self._max_labels = max_adapter_labels
        self._labels = AdapterLabels(max_adapter_labels)
        self._lock = threading.Lock()
        """Held while a request is counted, so that no series comes back after its removal."""
        self.requests = Counter(
            "lora_server_requests",
            "Requests that ended, by how: ok, error, cancelled.",
            ["adapter", "outcome"],
            registry=self._registry,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of the prompts.")
        self.cached_tokens = self._counter(
            "prompt_tokens_cached", "Tokens of the prompts that were found in the prefix cache."
        )
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
        self.adapter_load = Histogram(
            "lora_server_adapter_load_time_seconds",
            "One load of an adapter: from the disk, checked and packed; or into a slot.",
            ["stage"],
            buckets=_LOAD_BUCKETS_S,
            registry=self._registry,
        )
        self.slot_wait = Histogram(
            "lora_server_adapter_slot_wait_seconds",
            "What requests waited for room in the slots or for the copy into one; others are "
            "not counted.",
            buckets=_TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self._add_thrash_gauges()

    def record(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        with self._lock:
            label = self._labels.count(record.adapter)
            self.requests.labels(label, record.outcome.value).inc()
            self.prompt_tokens.labels(label).inc(record.num_prompt_tokens)
            self.cached_tokens.labels(label).inc(record.num_cached_tokens)
            self.generated_tokens.labels(label).inc(record.num_tokens)
            if record.queue_s is not None:
                self.queue.labels(label).observe(record.queue_s)
            if record.is_answered:
                self.duration.labels(label).observe(record.duration_s)
            if record.first_token_s is not None:
                self.ttft.labels(label).observe(record.first_token_s)
            if record.token_gap_s is not None:
                self.tpot.labels(label).observe(record.token_gap_s)

    def render(self, state: ScrapeState) -> bytes:
        """Return all metrics in Prometheus' text format, without adapters that are gone."""
        with self._lock:
            for name in self._labels.settle({adapter.name for adapter in state.adapters}):
                self._remove_series(name)
            named = self._labels.named
        scrape = CollectorRegistry()
        scrape.register(StateCollector(state, named, self._max_labels))
        return generate_latest(self._registry) + generate_latest(scrape)

    def _remove_series(self, name: str) -> None:
        for outcome in Outcome:
            self.requests.remove(name, outcome.value)
        for metric in (
            self.prompt_tokens,
            self.cached_tokens,
            self.generated_tokens,
            self.queue,
            self.ttft,
            self.tpot,
            self.duration,
        ):
            metric.remove(name)

    def _add_thrash_gauges(self) -> None:
        ratio = Gauge(
            "lora_server_adapter_evictions_per_request",
            "Evictions from slots per admitted request, over the window of --thrash-window.",
            registry=self._registry,
        )
        ratio.set_function(lambda: self.thrash.ratio)
        is_on = Gauge(
            "lora_server_adapter_thrash",
            "1 while evictions per request say that --max-loras is too low.",
            registry=self._registry,
        )
        is_on.set_function(lambda: float(self.thrash.is_on))

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
