"""Metrics: what is counted, which labels exist, and which disappear."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lora_server.metrics import (
    OTHER_LABEL,
    RequestTimer,
    ScrapeState,
    ServerMetrics,
    ThrashAlarm,
)

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Adapter:
    name: str
    digest: str = "d"
    residency: str = "device"


@dataclass(frozen=True)
class Tier:
    hits: int = 5
    misses: int = 4
    evictions: int = 3
    loads: int = 2
    load_s: float = 1.5
    load_failures: int = 6


@dataclass(frozen=True)
class Cache:
    device: Tier = field(default_factory=Tier)
    host: Tier = field(default_factory=lambda: Tier(hits=50))
    slots_placing: int = 3
    slots_pinned: int = 1
    slots_leased: int = 2
    device_bytes: int = 100
    host_bytes: int = 200


@dataclass(frozen=True)
class Engine:
    num_running: int = 3
    num_waiting: int = 2
    num_waiting_for_slot: int = 1
    num_waiting_for_load: int = 0
    kv_blocks_total: int = 8
    kv_block_size: int = 16
    kv_blocks_used: int = 2
    kv_blocks_kept: int = 4
    prefix_queries: int = 40
    prefix_hits: int = 10
    preemptions: int = 1
    generated_tokens: int = 77
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    slots_total: int = 4
    slots_used: int = 3
    cache: Cache | None = field(default_factory=Cache)


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(metrics: ServerMetrics, *adapters: Adapter, engine: Engine | None = None) -> Samples:
    state = ScrapeState(engine=engine or Engine(), adapters=adapters, now_s=1000.0)
    text = metrics.render(state).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def timer(
    metrics: ServerMetrics, adapter: str, clock: Callable[[], float], num_sequences: int = 1
) -> RequestTimer:
    return RequestTimer(
        metrics, adapter, clock=clock, num_prompt_tokens=7, num_sequences=num_sequences
    )


def serve(metrics: ServerMetrics, adapter: str) -> None:
    with timer(metrics, adapter, lambda: 0.0) as running:
        running.add_tokens(1)


def labels(samples: Samples, name: str, label: str = "adapter") -> set[str]:
    return {dict(pairs)[label] for sample, pairs in samples if sample == name}


def test_a_request_is_measured_by_the_given_clock() -> None:
    metrics = ServerMetrics()
    times = iter([10.0, 10.5, 11.5, 12.5, 13.0])

    with timer(metrics, "a", lambda: next(times)) as running:
        running.admitted(10.25)
        running.add_tokens(1)
        running.admitted(99.0)
        running.add_cached_tokens(5)
        running.add_tokens(1)
        running.add_tokens(2)

    samples = scrape(metrics, Adapter("a"))
    key = (("adapter", "a"),)
    assert samples["lora_server_queue_time_seconds_sum", key] == 0.25
    assert samples["lora_server_time_to_first_token_seconds_sum", key] == 0.5
    assert samples["lora_server_time_per_output_token_seconds_sum", key] == pytest.approx(2 / 3)
    assert samples["lora_server_request_duration_seconds_sum", key] == 3.0
    assert samples["lora_server_prompt_tokens_total", key] == 7
    assert samples["lora_server_prompt_tokens_cached_total", key] == 5
    assert samples["lora_server_generation_tokens_total", key] == 4


def test_time_per_token_is_that_of_one_sequence() -> None:
    metrics = ServerMetrics()
    times = iter([0.0, 1.0, 3.0, 3.0])

    with timer(metrics, "a", lambda: next(times), num_sequences=2) as running:
        running.add_tokens(2)
        running.add_tokens(4)

    samples = scrape(metrics, Adapter("a"))
    assert samples["lora_server_time_per_output_token_seconds_sum", (("adapter", "a"),)] == 1.0


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(None, "ok"), (ValueError(), "error"), (GeneratorExit(), "cancelled")],
)
def test_requests_are_counted_by_how_they_end(error: BaseException | None, outcome: str) -> None:
    metrics = ServerMetrics()

    def run() -> None:
        with timer(metrics, "a", lambda: 0.0):
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()

    key = (("adapter", "a"), ("outcome", outcome))
    assert scrape(metrics, Adapter("a"))["lora_server_requests_total", key] == 1


def test_a_request_without_tokens_is_in_no_histogram() -> None:
    metrics = ServerMetrics()
    with timer(metrics, "base", lambda: 0.0) as running:
        running.add_tokens(0)

    assert labels(scrape(metrics), "lora_server_time_to_first_token_seconds_count") == set()


def test_adapters_beyond_the_limit_share_a_label() -> None:
    metrics = ServerMetrics(max_adapter_labels=2)
    adapters = [Adapter(f"a{i}", residency="host") for i in range(5000)]
    for adapter in adapters[::-1][:4]:
        serve(metrics, adapter.name)
    serve(metrics, "base")

    samples = scrape(metrics, *adapters)

    assert labels(samples, "lora_server_generation_tokens_total") == {
        "a4999",
        "a4998",
        OTHER_LABEL,
        "base",
    }
    other = (("adapter", OTHER_LABEL), ("tier", "host"))
    assert samples["lora_server_adapters", other] == 4998
    assert labels(samples, "lora_server_adapters") == {"a4999", "a4998", OTHER_LABEL}


def test_c54_5000_names_make_as_many_series_as_the_limit_says() -> None:
    metrics = ServerMetrics(max_adapter_labels=100)
    adapters = [Adapter(f"a{i}") for i in range(5000)]
    for adapter in adapters:
        serve(metrics, adapter.name)

    samples = scrape(metrics, *adapters)

    everywhere = {dict(pairs).get("adapter") for _, pairs in samples} - {None}
    assert len(everywhere) == 101
    assert sum(v for (n, _), v in samples.items() if n == "lora_server_requests_total") == 5000
    assert sum(v for (n, _), v in samples.items() if n == "lora_server_adapters") == 5000


def test_adapters_with_most_requests_take_the_labels_of_others() -> None:
    metrics = ServerMetrics(max_adapter_labels=2)
    adapters = [Adapter(name) for name in ("rare", "some", "busy")]
    for name, count in (("rare", 1), ("some", 8), ("busy", 9)):
        for _ in range(count):
            serve(metrics, name)

    before = scrape(metrics, *adapters)
    serve(metrics, "busy")
    serve(metrics, "rare")
    after = scrape(metrics, *adapters)

    def requests(samples: Samples) -> dict[str, float]:
        name = "lora_server_generation_tokens_total"
        return {dict(pairs)["adapter"]: v for (n, pairs), v in samples.items() if n == name}

    assert requests(before) == {"some": 8, OTHER_LABEL: 9}
    assert requests(after) == {"some": 8, "busy": 1, OTHER_LABEL: 10}


def test_a_small_lead_takes_no_label_from_another_adapter() -> None:
    metrics = ServerMetrics(max_adapter_labels=1)
    for name, count in (("first", 8), ("second", 9)):
        for _ in range(count):
            serve(metrics, name)

    samples = scrape(metrics, Adapter("first"), Adapter("second"))

    assert labels(samples, "lora_server_requests_total") == {"first", OTHER_LABEL}


def test_an_adapter_named_like_the_shared_label_is_counted_there() -> None:
    metrics = ServerMetrics(max_adapter_labels=5)
    serve(metrics, OTHER_LABEL)

    samples = scrape(metrics, Adapter(OTHER_LABEL))
    assert labels(scrape(metrics), "lora_server_requests_total") == {OTHER_LABEL}
    assert samples["lora_server_adapters", (("adapter", OTHER_LABEL), ("tier", "device"))] == 1


def test_a_request_that_ends_after_its_adapter_was_unloaded_leaves_no_series() -> None:
    metrics = ServerMetrics()
    scrape(metrics)
    serve(metrics, "late")

    assert labels(scrape(metrics), "lora_server_requests_total") == set()


def test_the_series_of_an_unloaded_adapter_disappear_and_free_their_label() -> None:
    metrics = ServerMetrics(max_adapter_labels=1)
    serve(metrics, "old")
    scrape(metrics, Adapter("new"))
    serve(metrics, "new")

    samples = scrape(metrics, Adapter("new"))

    everywhere = {dict(pairs).get("adapter") for _, pairs in samples}
    assert everywhere == {None, "new"}


def test_a_version_is_told_by_the_beginning_of_its_digest() -> None:
    samples = scrape(ServerMetrics(), Adapter("a", digest="0123456789abcdef"))

    key = (("adapter", "a"), ("digest", "0123456789ab"))
    assert samples["lora_server_adapter_info", key] == 1


def test_every_adapter_has_a_series_with_its_tier_also_when_idle() -> None:
    samples = scrape(ServerMetrics(), Adapter("a"), Adapter("b", residency="disk"))

    assert samples["lora_server_adapters", (("adapter", "a"), ("tier", "device"))] == 1
    assert samples["lora_server_adapters", (("adapter", "b"), ("tier", "disk"))] == 1


@pytest.mark.parametrize("name", ['quo"te', "com,ma", "größe", "back\\slash", "new\nline"])
def test_c54_names_are_escaped(name: str) -> None:
    metrics = ServerMetrics()
    serve(metrics, name)

    assert labels(scrape(metrics, Adapter(name)), "lora_server_requests_total") == {name}


def test_the_gauge_of_vllms_routers_tells_running_and_waiting_apart() -> None:
    adapters = (Adapter("b", "d1"), Adapter("a", "d1"), Adapter("c", "d2"), Adapter("idle", "d3"))
    engine = Engine(running_adapters=("d1", "gone"), waiting_adapters=("d2",))

    samples = scrape(ServerMetrics(), *adapters, engine=engine)

    info = [(dict(pairs), v) for (name, pairs), v in samples.items() if "requests_info" in name]
    assert info == [
        (
            {
                "max_lora": "4",
                "running_lora_adapters": "a,b",
                "waiting_lora_adapters": "c",
            },
            1000.0,
        )
    ]


def test_an_outdated_label_set_of_that_gauge_disappears() -> None:
    metrics = ServerMetrics()
    scrape(metrics, Adapter("a", "d1"), engine=Engine(running_adapters=("d1",)))

    samples = scrape(metrics, Adapter("a", "d1"))

    assert labels(samples, "vllm:lora_requests_info", "running_lora_adapters") == {""}


def test_the_engines_state_is_read_at_the_scrape() -> None:
    samples = scrape(ServerMetrics())

    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:gpu_cache_usage_perc": 0.25,
        "vllm:prefix_cache_queries_total": 40,
        "vllm:prefix_cache_hits_total": 10,
        "vllm:generation_tokens_total": 77,
        "vllm:num_preemptions_total": 1,
        "lora_server_kv_blocks": 8,
        "lora_server_kv_blocks_kept": 4,
        "lora_server_requests_waiting_for_adapter_slot": 1,
        "lora_server_requests_waiting_for_adapter_load": 0,
        "lora_server_adapter_slots_placing": 3,
        "lora_server_kv_blocks_used": 2,
        "lora_server_adapter_slots": 4,
        "lora_server_adapter_slots_used": 3,
        "lora_server_adapter_slots_pinned": 1,
        "lora_server_adapter_slots_leased": 2,
    }
    assert {name: samples[name, ()] for name in expected} == expected


def test_routers_that_know_prompts_learn_the_size_of_the_cache() -> None:
    samples = scrape(ServerMetrics())

    key = (("block_size", "16"), ("num_gpu_blocks", "8"))
    assert samples["vllm:cache_config_info", key] == 1


def test_the_cache_is_counted_by_tier() -> None:
    samples = scrape(ServerMetrics())

    device = (("tier", "device"),)
    assert samples["lora_server_adapter_cache_hits_total", device] == 5
    assert samples["lora_server_adapter_cache_hits_total", (("tier", "host"),)] == 50
    assert samples["lora_server_adapter_cache_misses_total", device] == 4
    assert samples["lora_server_adapter_cache_evictions_total", device] == 3
    assert samples["lora_server_adapter_cache_loads_total", device] == 2
    assert samples["lora_server_adapter_cache_load_seconds_total", device] == 1.5
    assert samples["lora_server_adapter_cache_load_failures_total", device] == 6
    assert samples["lora_server_adapter_bytes", device] == 100


def test_without_adapters_there_are_no_cache_series() -> None:
    samples = scrape(ServerMetrics(), engine=Engine(cache=None, kv_blocks_total=0))

    assert labels(samples, "lora_server_adapter_bytes", "tier") == set()
    assert samples["vllm:kv_cache_usage_perc", ()] == 0


def test_two_services_in_one_process_count_apart() -> None:
    one, other = ServerMetrics(), ServerMetrics()
    serve(one, "base")

    assert labels(scrape(other), "lora_server_requests_total") == set()


def test_too_few_slots_show() -> None:
    now_s = 0.0
    alarm = ThrashAlarm(10.0, clock=lambda: now_s)
    metrics = ServerMetrics(thrash=alarm)
    before = scrape(metrics)

    for _ in range(60):
        now_s += 0.25
        alarm.evicted()
        alarm.admitted({"a"})

    after = scrape(metrics)
    names = ("lora_server_adapter_thrash", "lora_server_adapter_evictions_per_request")
    assert [before[name, ()] for name in names] == [0.0, 0.0]
    assert [after[name, ()] for name in names] == [1.0, 1.0]
