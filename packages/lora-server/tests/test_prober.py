"""Probes run one at a time, in slots that nobody needs, and leave no trace there."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from lora_layers import LoraModelConfig, LoraModelManager
from lora_layers.testing import TinyDecoder, build_adapter
from lora_server.effect import LogitShift, ProbeState, ShiftOf
from lora_server.engine.prober import EffectProber

if TYPE_CHECKING:
    from pathlib import Path

STRONG = LogitShift(max=2.0, mean=1.0, kl=0.5, of=ShiftOf.LOG_PROBABILITIES)
WEAK = LogitShift(max=0.001, mean=0.0005, kl=0.0, of=ShiftOf.LOG_PROBABILITIES)


class Script:
    """A probe whose results are written down, and which looks where the adapter is."""

    def __init__(self, manager: LoraModelManager) -> None:
        self._manager = manager
        self.results: dict[str, LogitShift | Exception | None] = {}
        self.asked: list[str] = []
        self.num_prepared = 0

    def prepare(self) -> None:
        self.num_prepared += 1
        raise RuntimeError("not today")

    def measure(self, digest: str) -> LogitShift | None:
        assert self._manager.slot_of(digest) is not None
        self.asked.append(digest)
        result = self.results.get(digest, STRONG)
        if isinstance(result, Exception):
            raise result
        return result


class Rig:
    """A manager with two slots and adapters a to d in host memory."""

    def __init__(self, folder: Path) -> None:
        config = LoraModelConfig(max_loras=2, max_lora_rank=4)
        self.manager = LoraModelManager(TinyDecoder(), config, is_paced=True)
        for seed, name in enumerate("abcd"):
            built = build_adapter(folder / name, ["layers.0.attn.q_proj"], r=2, seed=seed)
            self.manager.register(name, self.manager.prepare(built.adapter))
        self.script = Script(self.manager)
        self.prober = EffectProber(self.manager, self.script, shown=lambda key: f"name of {key}")


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_an_idle_engine_probes_at_once_and_takes_the_adapter_out_again(rig: Rig) -> None:
    assert rig.prober.ask("a", is_idle=True) is None

    assert rig.prober.state("a") == (ProbeState.DONE, STRONG)
    assert rig.manager.slot_of("a") is None
    assert rig.manager.stats().num_leases == 0
    assert rig.manager.stats().device.evictions == 0


def test_many_in_turn_evict_nobody(rig: Rig) -> None:
    for name in "abcd":
        rig.prober.ask(name, is_idle=True)

    assert rig.script.asked == ["a", "b", "c", "d"]
    assert rig.manager.stats().device.evictions == 0
    assert rig.manager.stats().slots_used == 0


def test_beside_running_steps_a_turn_runs_at_most_one_probe(rig: Rig) -> None:
    futures = [rig.prober.ask(name, is_idle=False) for name in "abc"]
    asked = []
    for _ in range(6):
        rig.prober.turn()
        rig.manager.advance()
        asked.append(len(rig.script.asked))

    assert asked == [0, 1, 1, 2, 2, 3]
    assert all(future is not None and future.done() for future in futures)


def test_where_no_slot_is_free_nobody_makes_room_until_a_request_brings_it_in(rig: Rig) -> None:
    lease = rig.manager.acquire(["a", "b"])

    assert rig.prober.ask("c", is_idle=True) is None
    rig.prober.turn()
    assert rig.prober.state("c") == (ProbeState.WAITING, None)
    lease.release()
    rig.prober.turn()
    assert rig.manager.slot_of("c") is None  # a and b may be needed again: they stay
    with rig.manager.acquire(["c"]):
        rig.prober.turn()

    assert rig.prober.state("c") == (ProbeState.DONE, STRONG)
    assert rig.manager.slot_of("c") is not None


def test_an_adapter_that_a_request_uses_meanwhile_keeps_its_slot(rig: Rig) -> None:
    rig.prober.ask("a", is_idle=False)
    rig.prober.turn()
    lease = rig.manager.begin(["a"])
    rig.manager.advance()

    rig.prober.turn()

    assert rig.prober.state("a")[0] is ProbeState.DONE
    assert rig.manager.slot_of("a") is not None
    lease.release()


def test_each_version_is_probed_once(rig: Rig) -> None:
    rig.prober.ask("a", is_idle=True)
    rig.prober.ask("a", is_idle=True)

    assert rig.script.asked == ["a"]


def test_a_probe_that_fails_is_told_and_ends_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.script.results = {"a": RuntimeError("no"), "b": None}

    rig.prober.ask("a", is_idle=True)
    rig.prober.ask("b", is_idle=True)

    assert rig.prober.state("a") == (ProbeState.FAILED, None)
    assert rig.prober.state("b") == (ProbeState.FAILED, None)
    assert rig.manager.stats().num_leases == 0
    assert "the probe of an adapter failed" in caplog.messages


def test_a_base_that_fails_ahead_of_time_is_told_and_ends_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.prober.prepare()

    assert rig.script.num_prepared == 1
    assert "the base's run of the probe failed" in caplog.messages


def test_a_rest_runs_one_probe_and_tells_whether_to_come_again(rig: Rig) -> None:
    for name in "abc":
        rig.prober.ask(name, is_idle=False)

    assert [rig.prober.rest() for _ in range(4)] == [True, True, True, False]
    assert rig.script.asked == ["a", "b", "c"]


def test_a_weak_adapter_is_a_warning_with_its_name_and_numbers(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.script.results = {"a": WEAK}

    rig.prober.ask("a", is_idle=True)
    rig.prober.ask("b", is_idle=True)

    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    fields = vars(record)["fields"]
    assert fields["adapter"] == "name of a"
    assert (fields["max_shift"], fields["kl"]) == (0.001, 0.0)


@pytest.mark.parametrize("turns", [0, 1])
def test_an_adapter_that_goes_away_leaves_nothing_behind(rig: Rig, turns: int) -> None:
    future = rig.prober.ask("a", is_idle=False)
    for _ in range(turns):
        rig.prober.turn()

    rig.prober.forget("a")
    rig.manager.remove("a")
    rig.manager.advance()
    rig.prober.turn()

    assert future is not None
    assert future.done()
    assert rig.script.asked == []
    assert rig.manager.stats().num_leases == 0
    assert rig.prober.state("a") == (ProbeState.WAITING, None)


def test_an_adapter_that_cannot_be_written_is_no_proof(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = rig.manager._injection.stacks["layers.0.attn.q_proj"]

    def refuse(*_: object) -> None:
        raise RuntimeError("told to fail")

    monkeypatch.setattr(type(stack), "write", refuse)

    rig.prober.ask("a", is_idle=True)

    assert rig.prober.state("a") == (ProbeState.FAILED, None)
    assert rig.manager.stats().num_leases == 0
