"""Metric families that describe a moment: queues, slots, blocks, residency.

They are made anew for every scrape, so that a label set that no longer holds disappears.
"""

from __future__ import annotations

from collections import Counter as Tally
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lora_server.metrics.labels import OTHER_LABEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lora_server.metrics.protocols import CacheSnapshot, ScrapeState

_DIGEST_CHARS: Final = 12


class StateCollector(Collector):
    """Metric families made from one scrape's state; nothing outlives the scrape."""

    def __init__(self, state: ScrapeState, named: Sequence[str], max_labels: int) -> None:
        self._state = state
        self._named = named
        self._max_labels = max_labels

    def collect(self) -> Iterator[Metric]:
        """Yield every family once."""
        yield self._requests_info()
        yield from self._engine()
        yield self._residency()
        yield self._digests()
        if self._state.engine.cache is not None:
            yield from _cache_families(self._state.engine.cache)

    def _requests_info(self) -> Metric:
        """Build the gauge by which vLLM's routers find replicas that hold an adapter."""
        engine = self._state.engine
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of running and of waiting requests; the value is the time.",
            labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
        )
        names = (self._names(engine.waiting_adapters), self._names(engine.running_adapters))
        family.add_metric([str(engine.slots_total), *names], self._state.now_s)
        return family

    def _names(self, digests: Sequence[str]) -> str:
        wanted = set(digests)
        names = {a.name for a in self._state.adapters if a.digest in wanted}
        return ",".join(sorted(names))

    def _engine(self) -> Iterator[Metric]:
        engine = self._state.engine
        used = engine.kv_blocks_used / engine.kv_blocks_total if engine.kv_blocks_total else 0.0
        yield _gauge("vllm:num_requests_running", "Sequences being generated.", engine.num_running)
        yield _gauge("vllm:num_requests_waiting", "Sequences waiting.", engine.num_waiting)
        yield _gauge(
            "lora_server_requests_waiting_for_adapter_slot",
            "Waiting sequences that lack nothing but an adapter slot.",
            engine.num_waiting_for_slot,
        )
        yield _gauge(
            "lora_server_requests_waiting_for_adapter_load",
            "Waiting sequences whose adapters are being read.",
            engine.num_waiting_for_load,
        )
        yield _gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", used)
        yield _gauge("vllm:gpu_cache_usage_perc", "The same under its older name.", used)
        yield self._cache_config()
        yield _gauge("lora_server_kv_blocks", "Blocks of the KV pool.", engine.kv_blocks_total)
        yield _gauge("lora_server_kv_blocks_used", "Blocks in use.", engine.kv_blocks_used)
        yield _gauge(
            "lora_server_kv_blocks_kept",
            "Blocks not in use that a prompt may still find.",
            engine.kv_blocks_kept,
        )
        yield _counter(
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            engine.prefix_queries,
        )
        yield _counter("vllm:prefix_cache_hits", "Prompt tokens found there.", engine.prefix_hits)
        yield _counter(
            "vllm:generation_tokens",
            "Tokens sampled, step by step; those of unfinished requests included.",
            engine.generated_tokens,
        )
        yield _counter("vllm:num_preemptions", "Sequences sent back to wait.", engine.preemptions)
        yield _gauge("lora_server_adapter_slots", "Device slots.", engine.slots_total)
        yield _gauge("lora_server_adapter_slots_used", "Slots in use.", engine.slots_used)

    def _cache_config(self) -> Metric:
        """Build the gauge by which routers that know prompts learn the size of the KV cache."""
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "1; the labels tell the size of the KV cache.",
            labels=["block_size", "num_gpu_blocks"],
        )
        engine = self._state.engine
        family.add_metric([str(engine.kv_block_size), str(engine.kv_blocks_total)], 1)
        return family

    def _residency(self) -> Metric:
        family = GaugeMetricFamily(
            "lora_server_adapters",
            "Adapters served, by the fastest tier that holds them: device, host, disk.",
            labels=["adapter", "tier"],
        )
        counts: Tally[tuple[str, str]] = Tally()
        shown = self._shown()
        for adapter in self._state.adapters:
            label = adapter.name if adapter.name in shown else OTHER_LABEL
            counts[label, adapter.residency] += 1
        for labels, count in counts.items():
            family.add_metric(labels, count)
        return family

    def _digests(self) -> Metric:
        """Build the gauge that tells which version each name stands for."""
        family = GaugeMetricFamily(
            "lora_server_adapter_info",
            "1 for the version that an adapter's name stands for.",
            labels=["adapter", "digest"],
        )
        shown = self._shown()
        for adapter in self._state.adapters:
            if adapter.name in shown:
                family.add_metric([adapter.name, adapter.digest[:_DIGEST_CHARS]], 1)
        return family

    def _shown(self) -> frozenset[str]:
        """Adapters with series of their own: those that were used, then the oldest."""
        names = dict.fromkeys((*self._named, *(a.name for a in self._state.adapters)))
        return frozenset(list(names)[: self._max_labels])


def _cache_families(cache: CacheSnapshot) -> Iterator[Metric]:
    tiers = {"device": cache.device, "host": cache.host}
    for name, text, values in (
        ("hits", "Adapters found in the tier.", {t: s.hits for t, s in tiers.items()}),
        ("misses", "Adapters brought in.", {t: s.misses for t, s in tiers.items()}),
        ("evictions", "Adapters evicted.", {t: s.evictions for t, s in tiers.items()}),
        ("loads", "Adapters written into the tier.", {t: s.loads for t, s in tiers.items()}),
        (
            "load_failures",
            "Adapters that could not be written.",
            {t: s.load_failures for t, s in tiers.items()},
        ),
        ("load_seconds", "Time spent on loads.", {t: s.load_s for t, s in tiers.items()}),
    ):
        family = CounterMetricFamily(f"lora_server_adapter_cache_{name}", text, labels=["tier"])
        for tier, value in values.items():
            family.add_metric([tier], value)
        yield family
    held = GaugeMetricFamily(
        "lora_server_adapter_bytes", "Bytes of the adapters in the tier.", labels=["tier"]
    )
    held.add_metric(["device"], cache.device_bytes)
    held.add_metric(["host"], cache.host_bytes)
    yield held
    yield _gauge("lora_server_adapter_slots_placing", "Slots being written.", cache.slots_placing)
    yield _gauge("lora_server_adapter_slots_pinned", "Pinned slots.", cache.slots_pinned)
    yield _gauge("lora_server_adapter_slots_leased", "Leased slots.", cache.slots_leased)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
