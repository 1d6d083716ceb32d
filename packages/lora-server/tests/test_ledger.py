"""Totals and the verdict follow from the parts; the route hands on what the meter says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from lora_server.ledger import (
    AdapterLedger,
    HostTierLedger,
    KvLedger,
    LayerKind,
    LedgerKind,
    MachineLedger,
    MemoryLedger,
    SlotBytes,
    SlotsLedger,
    Verdict,
    WeightsLedger,
    WorkspaceLedger,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from conftest import Harness

SLOTS = SlotBytes(size_bytes=400, used_bytes=100, padding_bytes=100, empty_bytes=200, num_modules=3)
LEDGER = MemoryLedger(
    kind=LedgerKind.PLANNED,
    model="m",
    task="generate",
    device="cpu",
    dtype="float32",
    lora_dtype="float32",
    weights=WeightsLedger(size_bytes=1000, tied_bytes=50, prepacked_bytes=10),
    kv_cache=KvLedger(size_bytes=200, block_bytes=20, num_blocks=10, block_size=4, num_tokens=40),
    slots=SlotsLedger(
        total=SLOTS, by_kind={LayerKind.MLP: SLOTS}, num_slots=4, max_rank=8, slot_bytes=100
    ),
    host_tier=HostTierLedger(
        size_bytes=60, num_adapters=2, capacity=10, adapter_bytes=30, limit_bytes=300
    ),
    workspace=WorkspaceLedger(size_bytes=7, activations_bytes=3, attention_bytes=4, logits_bytes=6),
    runtime_bytes=23,
    adapters=(AdapterLedger(name="a", rank=4, size_bytes=30),),
    machine=MachineLedger(
        device="cpu",
        host_total_bytes=4000,
        host_available_bytes=4000,
        device_total_bytes=None,
        device_available_bytes=None,
    ),
    process=None,
)


def test_totals_count_every_part_once() -> None:
    assert LEDGER.model_bytes == 1000 + 10 + 200 + 400 + 7
    assert LEDGER.total_bytes == LEDGER.model_bytes + 23 + 60
    assert LEDGER.limit_bytes == LEDGER.model_bytes + 23 + 300


@pytest.mark.parametrize(
    ("available", "verdict"),
    [(4000, Verdict.FITS), (2000, Verdict.TIGHT), (1939, Verdict.DOES_NOT_FIT)],
)
def test_the_verdict_is_about_a_full_host_tier(available: int, verdict: Verdict) -> None:
    machine = replace(LEDGER.machine, host_available_bytes=available)

    assert replace(LEDGER, machine=machine).verdict is verdict


def test_beside_a_device_each_memory_is_judged_by_itself() -> None:
    machine = replace(
        LEDGER.machine, device="cuda", device_total_bytes=9999, device_available_bytes=9999
    )
    ledger = replace(LEDGER, device="cuda", machine=machine)

    def judged(*, device: int, host: int) -> Verdict:
        changed = replace(machine, device_available_bytes=device, host_available_bytes=host)
        return replace(ledger, machine=changed).verdict

    assert judged(device=9999, host=9999) is Verdict.FITS
    assert judged(device=1616, host=9999) is Verdict.DOES_NOT_FIT
    assert judged(device=1617, host=9999) is Verdict.TIGHT
    assert judged(device=9999, host=322) is Verdict.DOES_NOT_FIT


def test_a_device_that_is_not_here_gets_no_verdict() -> None:
    assert replace(LEDGER, device="cuda").verdict is Verdict.UNKNOWN


def test_without_adapters_and_cache_the_rest_adds_up() -> None:
    ledger = replace(LEDGER, kv_cache=None, slots=None, host_tier=None)

    assert ledger.total_bytes == ledger.limit_bytes == 1000 + 10 + 7 + 23


def test_the_json_has_the_totals_and_plain_keys() -> None:
    found = json.loads(json.dumps(LEDGER.as_json()))

    assert found["total_bytes"] == LEDGER.total_bytes
    assert found["verdict"] == "fits"
    assert found["slots"]["by_kind"]["mlp"]["padding_bytes"] == 100
    assert found["kind"] == "planned"
    assert found["process"] is None


class Meter:
    """Says that a server was measured, and which adapters it was told of."""

    def measure(self, adapters: Sequence[AdapterLedger]) -> MemoryLedger:
        return replace(LEDGER, kind=LedgerKind.MEASURED, adapters=tuple(adapters))


def test_the_route_tells_the_ledger_with_every_adapter_by_name(
    make_harness: Callable[..., Harness],
) -> None:
    reply = make_harness(memory=Meter()).get("/v1/memory")

    assert reply.status_code == 200
    found = reply.json()
    assert found["kind"] == "measured"
    assert [adapter["name"] for adapter in found["adapters"]] == ["sql", "Legal"]
    assert found.keys() == LEDGER.as_json().keys()


def test_a_service_that_measures_nothing_says_so(harness: Harness) -> None:
    reply = harness.get("/v1/memory")

    assert reply.status_code == 503
    assert "ledger" in harness.error(reply)["message"]
