"""What is told of adapters' moves: one line each, by name, with times from a given clock."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from lora_cache import Tier
from lora_layers import WrittenSlot
from lora_server.engine.journal import AdapterJournal
from lora_server.exchange import Exchange, current_exchange
from lora_server.logs import fields_of
from lora_server.metrics import ServerMetrics, Thrash, ThrashAlarm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lora_server.metrics import RequestRecord
    from lora_server.traces import TracedLoad, TracedRequest

DIGEST = "0123456789abcdef"
SHORT = "0123456789ab"


class Spans:
    """Keeps what would be sent."""

    def __init__(self) -> None:
        self.loads: list[TracedLoad] = []

    def record_request(self, request: TracedRequest, record: RequestRecord) -> None:
        raise AssertionError

    def record_load(self, load: TracedLoad) -> None:
        self.loads.append(load)

    def close(self) -> None:
        raise AssertionError


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics() -> ServerMetrics:
    return ServerMetrics()


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def journal(metrics: ServerMetrics, spans: Spans, clock: Clock) -> AdapterJournal:
    journal = AdapterJournal(metrics, spans, clock=clock)
    journal.known(DIGEST, "sql", 4096)
    return journal


@pytest.fixture(autouse=True)
def caught(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, logger="lora_server"):
        yield


def only_line(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    (record,) = caplog.records
    return {"level": record.levelname, "message": record.getMessage(), **fields_of(record)}


def count(metrics: ServerMetrics, stage: str) -> float:
    samples = metrics.adapter_load.labels(stage)._child_samples()
    return next(s.value for s in samples if s.name == "_count")


def test_a_load_is_a_line_a_sample_and_a_span(
    journal: AdapterJournal,
    metrics: ServerMetrics,
    spans: Spans,
    caplog: pytest.LogCaptureFixture,
) -> None:
    exchange = Exchange(request_id="r-1", traceparent="00-a-b-01")
    token = current_exchange.set(exchange)
    journal.loaded("sql", DIGEST, rank=8, size_bytes=4096, seconds=0.25)

    assert only_line(caplog) == {
        "level": "INFO",
        "message": "Loaded LoRA adapter",
        "adapter": "sql",
        "digest": SHORT,
        "ms": 250.0,
        "bytes": 4096,
        "rank": 8,
        "request_id": "r-1",
    }
    current_exchange.reset(token)
    assert count(metrics, "disk") == 1
    (span,) = spans.loads
    assert (span.stage, span.digest, span.seconds) == ("disk", DIGEST, 0.25)
    assert span.exchange == exchange


def test_an_update_names_both_versions(
    journal: AdapterJournal, caplog: pytest.LogCaptureFixture
) -> None:
    journal.loaded("sql", DIGEST, rank=8, size_bytes=1, seconds=0.0, replaced="f" * 64)

    line = only_line(caplog)
    assert line["message"] == "Updated LoRA adapter"
    assert (line["digest"], line["replaced"]) == (SHORT, "f" * 12)


def test_a_load_that_failed_is_told_with_its_reason(
    journal: AdapterJournal,
    metrics: ServerMetrics,
    spans: Spans,
    caplog: pytest.LogCaptureFixture,
) -> None:
    journal.load_failed("sql", ValueError("rank 99"), seconds=0.5)

    line = only_line(caplog)
    assert (line["level"], line["adapter"], line["reason"]) == ("WARNING", "sql", "rank 99")
    assert isinstance(spans.loads[0].error, ValueError)
    assert count(metrics, "disk") == 0


def test_an_unload_tells_how_long_it_was_there(
    journal: AdapterJournal, caplog: pytest.LogCaptureFixture
) -> None:
    journal.unloaded("sql", DIGEST, size_bytes=4096, seconds=2.0)

    assert only_line(caplog) == {
        "level": "INFO",
        "message": "Unloaded LoRA adapter",
        "adapter": "sql",
        "digest": SHORT,
        "ms": 2000.0,
        "bytes": 4096,
    }


@pytest.mark.parametrize("tier", list(Tier))
def test_an_eviction_tells_the_tier_and_how_long_it_was_there(
    tier: Tier, journal: AdapterJournal, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    journal.written(WrittenSlot(key=DIGEST, slot=3, seconds=0.5))
    caplog.clear()
    clock.now_s += 7

    journal.evicted(DIGEST, tier)

    assert only_line(caplog) == {
        "level": "INFO",
        "message": "Evicted LoRA adapter",
        "adapter": "sql",
        "digest": SHORT,
        "ms": 7000.0,
        "bytes": 4096,
        "tier": tier.value,
    }


def test_a_write_into_a_slot_is_told_and_timed(
    journal: AdapterJournal,
    metrics: ServerMetrics,
    spans: Spans,
    caplog: pytest.LogCaptureFixture,
) -> None:
    journal.written(WrittenSlot(key=DIGEST, slot=3, seconds=0.5))

    line = only_line(caplog)
    assert (line["message"], line["slot"], line["ms"]) == (
        "Placed LoRA adapter in a slot",
        3,
        500.0,
    )
    assert count(metrics, "slot") == 1
    assert spans.loads[0].stage == "slot"


def test_what_could_not_be_written_or_read_is_an_error(
    journal: AdapterJournal, caplog: pytest.LogCaptureFixture
) -> None:
    journal.written(WrittenSlot(key=DIGEST, slot=3, seconds=0.5, error=ValueError("no room")))
    journal.read_again(DIGEST, seconds=0.5, error=OSError("gone"))

    fields = [fields_of(record) for record in caplog.records]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert [(line["adapter"], line["reason"]) for line in fields] == [
        ("sql", "no room"),
        ("sql", "gone"),
    ]


def test_nothing_is_kept_of_a_retired_version(journal: AdapterJournal) -> None:
    journal.written(WrittenSlot(key=DIGEST, slot=3, seconds=0.5))

    journal.retired(DIGEST)

    assert journal._versions == {}
    assert journal._since_s == {}


def test_evictions_from_slots_and_admitted_requests_reach_the_alarm(clock: Clock) -> None:
    alarm = ThrashAlarm(10.0, clock=clock)
    journal = AdapterJournal(ServerMetrics(thrash=alarm))
    raised = []
    for i in range(40):
        clock.now_s += 1
        journal.evicted(DIGEST, Tier.DEVICE)
        journal.evicted(DIGEST, Tier.HOST)
        raised.append(journal.admitted({f"a{i % 3}"}))
        journal.admitted(())  # a base request takes no slot

    assert alarm.ratio == 1.0
    assert [thrash.num_adapters for thrash in raised if thrash is not None] == []

    for i in range(40):
        clock.now_s += 0.4
        journal.evicted(DIGEST, Tier.DEVICE)
        raised.append(journal.admitted({f"a{i % 3}"}))
    assert [thrash.num_adapters for thrash in raised if thrash is not None] == [3]


@pytest.mark.parametrize(
    ("host_capacity", "remedy"),
    [(32, "--max-loras 12 ("), (10, "--max-loras 12 --max-cpu-loras 12 (")],
)
def test_the_warning_of_too_few_slots_names_the_remedy(
    host_capacity: int,
    remedy: str,
    journal: AdapterJournal,
    caplog: pytest.LogCaptureFixture,
) -> None:
    thrash = Thrash(window_s=60.0, num_evictions=50, num_admitted=60, num_adapters=12)

    journal.warn_of_thrash(thrash, num_slots=8, slot_bytes=3 * 2**20, host_capacity=host_capacity)

    line = only_line(caplog)
    assert line["level"] == "WARNING"
    assert remedy + "12.0 MiB more)" in line["message"]
    assert "50 evictions from 8 slots for 60 requests of 12 adapters in 60 s" in line["message"]


def test_waits_for_slots_are_counted_apart(journal: AdapterJournal, metrics: ServerMetrics) -> None:
    journal.waited_for_slot(0.75)

    (family,) = metrics.slot_wait.collect()
    values = {sample.name: sample.value for sample in family.samples}
    assert values["lora_server_adapter_slot_wait_seconds_sum"] == 0.75
    assert values["lora_server_adapter_slot_wait_seconds_count"] == 1
