"""Waits of the scheduler alone: with a clock moved by hand every request starts within a bound.

The bound of a request is `--max-adapter-wait`, and then, for each other adapter that may be ahead
of it, the turn that this one's victims are owed: a step for a token, the steps of their prompt, and
those in which the slot is written.
"""

from __future__ import annotations

import random
import statistics
from typing import TYPE_CHECKING

import pytest

from lora_server.engine.claims import SlotClaim
from lora_server.engine.simulation import Bench, Gate

if TYPE_CHECKING:
    from lora_server.engine.sequence import SequenceState

STEP_S = 0.05
"""What a step takes here."""
WRITE_STEPS = 2
"""Steps for which a slot is being written here."""


class Traffic:
    """Arrivals at random, and for each request the time at which it first ran."""

    def __init__(self, bench: Bench, gate: Gate) -> None:
        self.bench = bench
        self.gate = gate
        self.arrived_s: dict[SequenceState, float] = {}
        self.started_s: dict[SequenceState, float] = {}

    @property
    def now_s(self) -> float:
        return self.bench.clock.now

    def send(self, adapter: str | None, *, prompt: tuple[int, ...], new: int) -> SequenceState:
        sequence = self.bench.add(prompt, new, adapter)
        self.arrived_s[sequence] = self.now_s
        return sequence

    def step(self, number: int) -> None:
        """Let one step pass; slots are written every few of them."""
        self.bench.clock.now += STEP_S
        if number % WRITE_STEPS == 0:
            self.gate.write()
        for sequence in self.bench.step():
            self.started_s.setdefault(sequence, self.now_s)

    def waits_s(self) -> list[float]:
        """How long each request waited, those included that have not run yet."""
        return [
            self.started_s.get(sequence, self.now_s) - arrived
            for sequence, arrived in self.arrived_s.items()
        ]


def bound_s(*, wait_s: float, num_adapters: int, prompt_steps: int) -> float:
    """Longest wait for a slot that follows from the configuration."""
    turn_steps = prompt_steps + 1 + WRITE_STEPS + 1
    return wait_s + num_adapters * turn_steps * STEP_S


@pytest.mark.parametrize("seed", range(12))
def test_three_times_as_many_adapters_as_slots_all_start_within_the_bound(seed: int) -> None:
    """S3: a steady stream on N adapters, and now and then one of the 2N others."""
    chance = random.Random(seed)
    num_slots = chance.choice([1, 2, 4])
    names = [f"a{i:02}" for i in range(3 * num_slots)]
    gate = Gate(num_slots, names, writes_at_once=False)
    wait_s = chance.choice([0.0, 0.5, 2.0])
    bench = Bench(gate=gate, wait=wait_s, seqs=256, budget=256, blocks=4096)
    traffic = Traffic(bench, gate)
    hot = names[:num_slots]

    for number in range(1500):
        if number < 1200:
            for name in hot:
                if chance.random() < 0.2:
                    traffic.send(name, prompt=(1, 2, 3), new=chance.randint(1, 40))
            if chance.random() < 0.1:
                traffic.send(chance.choice(names), prompt=(4, 5), new=chance.randint(1, 10))
            if chance.random() < 0.1:
                traffic.send(None, prompt=(6,), new=3)
        traffic.step(number)

    limit = bound_s(wait_s=wait_s, num_adapters=len(names), prompt_steps=1)
    assert max(traffic.waits_s()) <= limit
    assert len({d for s in traffic.started_s for d in s.adapter_digests}) == len(names)


def test_c42_one_request_beside_a_steady_stream_starts_within_the_wait_and_costs_little() -> None:
    gate = Gate(1, "ab")
    bench = Bench(gate=gate, wait=2.0, seqs=8, budget=64)
    traffic = Traffic(bench, gate)
    cold: SequenceState | None = None
    num_tokens = 0

    for number in range(400):
        if number % 5 == 0:
            traffic.send("a", prompt=(1, 2, 3), new=20)  # several of them always run
        if number == 40:
            cold = traffic.send("b", prompt=(4, 5), new=5)
        traffic.step(number)
        num_tokens += len(bench.scheduler.running)

    assert cold is not None
    assert cold.is_finished
    wait_s = traffic.started_s[cold] - traffic.arrived_s[cold]
    assert wait_s <= bound_s(wait_s=2.0, num_adapters=2, prompt_steps=1)
    # Five running sequences of `a`: the turn of `b` may cost what a few steps of them make.
    assert num_tokens >= 0.9 * 400 * 4


def median_ttft_s(*, num_slots: int, new: int, wait_s: float) -> float:
    """Median time to the first token of 16 clients that never stop, over 8 adapters.

    A step takes 60 ms and 0.8 ms a token, as a small model on two cores does.
    """
    chance = random.Random(new)
    names = [f"a{i}" for i in range(8)]
    gate = Gate(num_slots, names, writes_at_once=False)
    bench = Bench(gate=gate, wait=wait_s, seqs=64, budget=512, blocks=4096)
    arrived_s: dict[SequenceState, float] = {}
    ttft_s: dict[SequenceState, float] = {}
    open_ones: list[SequenceState] = []
    while len(ttft_s) < 300:
        while len(open_ones) < 16:
            prompt = tuple(chance.choices(range(10**6), k=64))
            length = chance.randint(new // 2, new * 3 // 2)
            sequence = bench.add(prompt, length, chance.choice(names))
            arrived_s[sequence] = bench.clock.now
            open_ones.append(sequence)
        gate.write()
        bench.clock.now += 0.06 + 0.0008 * sum(bench.step().values())
        for sequence in open_ones:
            if sequence.num_generated:
                ttft_s.setdefault(sequence, bench.clock.now - arrived_s[sequence])
        open_ones = [sequence for sequence in open_ones if not sequence.is_finished]
    return statistics.median(ttft_s.values())


@pytest.mark.parametrize("new", [16, 32, 64])
def test_s10_twice_as_many_hot_adapters_as_slots_wait_at_most_five_times_as_long(new: int) -> None:
    enough = median_ttft_s(num_slots=8, new=new, wait_s=2.0)
    scarce = median_ttft_s(num_slots=4, new=new, wait_s=2.0)

    assert scarce <= 5 * enough


def test_a_saturated_step_is_shared_between_adapters_not_between_requests() -> None:
    bench = Bench(gate=Gate(2, "ab"), budget=8, seqs=8, blocks=512, prefixes=False)
    for _ in range(60):
        bench.add((1, 2, 3, 4), 4, "a")
    for _ in range(12):
        bench.add((1, 2, 3, 4), 4, "b")
    tokens = {"a": 0, "b": 0}
    for _ in range(30):
        for sequence, count in bench.step().items():
            tokens[next(iter(sequence.adapter_digests))] += count
        if not any("b" in s.adapter_digests for s in bench.scheduler.waiting):
            break

    assert sum(tokens.values()) >= 100
    assert abs(tokens["a"] - tokens["b"]) <= 4 * 8


def test_base_requests_have_their_share_too() -> None:
    bench = Bench(gate=Gate(1, "a"), budget=4, seqs=4, blocks=512, prefixes=False)
    for _ in range(50):
        bench.add((1, 2, 3, 4), 4, "a")
    base = bench.add((1, 2, 3, 4), 1)

    steps = 0
    while not base.is_finished:
        bench.step()
        steps += 1

    assert steps <= 12


def test_a_request_waits_for_its_slot_to_be_written_and_nobody_else_does() -> None:
    gate = Gate(2, "ab", writes_at_once=False)
    bench = Bench(gate=gate)
    other = bench.add(3, 20)
    one = bench.add(3, 1, "a")

    first, second = bench.step(), bench.step()
    assert set(first) == set(second) == {other}
    assert one.lease is not None
    assert (bench.scheduler.num_waiting_for_slot, bench.scheduler.num_waiting_for_load) == (1, 0)
    gate.write()

    assert set(bench.step()) == {other, one}
    assert bench.scheduler.num_waiting_for_slot == 0


def test_a_wait_for_a_slot_is_told_as_it_ends_and_other_waits_are_not() -> None:
    gate = Gate(1, "ab", writes_at_once=False)
    bench = Bench(gate=gate, wait=100.0)
    first, second, base = bench.add(3, 4, "a"), bench.add(3, 1, "b"), bench.add(3, 1)

    bench.step()
    bench.clock.now += 0.25  # the first one's slot is being written
    gate.write()
    for _ in range(4):
        bench.step()
        bench.clock.now += 1.0
    bench.step()
    bench.clock.now += 0.5  # so is the second one's
    gate.write()
    bench.step()

    assert first.is_finished
    assert second.is_finished
    assert base.is_finished
    assert bench.slot_waits == [0.25, 0.25 + 4.0 + 0.5]


def test_c39_a_request_that_is_given_up_while_its_slot_is_written_holds_nothing() -> None:
    gate = Gate(1, "ab", writes_at_once=False)
    bench = Bench(gate=gate)
    given_up = bench.add(3, 1, "a")
    bench.step()

    bench.scheduler.finish(given_up)
    gate.write()
    other = bench.add(3, 1, "b")
    bench.step()
    gate.write()
    bench.step()

    assert other.is_finished
    assert not gate.cache.leased_keys()


def test_a_slot_that_is_promised_keeps_a_seat_for_its_request() -> None:
    gate = Gate(1, "a", writes_at_once=False)
    bench = Bench(gate=gate, seqs=1)
    first = bench.add(3, 1, "a")
    bench.step()
    late = bench.add(3, 50)

    bench.step()
    assert late in bench.scheduler.waiting
    gate.write()

    assert set(bench.step()) == {first}
    assert set(bench.step()) == {late}


def test_a_request_short_of_blocks_gives_its_slot_back() -> None:
    gate = Gate(1, "ab")
    bench = Bench(gate=gate, blocks=4, prefixes=False)
    bench.add(3, 12)
    bench.step()
    large = bench.add(16, 1, "a")

    bench.step()

    assert large in bench.scheduler.waiting
    assert not gate.cache.leased_keys()


@pytest.mark.parametrize("num_steps", [1, 30])
def test_a_claim_waits_for_a_slot_as_a_request_does_and_acts_once(num_steps: int) -> None:
    gate = Gate(1, "ab")
    bench = Bench(gate=gate, wait=1.0, budget=64)
    if num_steps > 1:
        bench.add(3, 100, "a")
    bench.step()
    pins: list[str] = []
    claim = SlotClaim("b", lambda: pins.append("b"))
    bench.scheduler.claims.append(claim)

    for _ in range(num_steps):
        assert not claim.outcome.done()
        bench.clock.now += 0.05
        if bench.step() is not None and claim.outcome.done():
            break

    assert claim.outcome.result(timeout=0) is None
    assert pins == ["b"]
    assert bench.clock.now <= 1.2
    assert claim.lease is None


def test_a_claim_tells_what_its_work_raised_and_lets_go() -> None:
    gate = Gate(1, "a")
    bench = Bench(gate=gate)

    def refuse() -> None:
        raise ValueError("no")

    claim = SlotClaim("a", refuse)
    bench.scheduler.claims.append(claim)
    bench.step()

    with pytest.raises(ValueError, match="no"):
        claim.outcome.result(timeout=0)
    assert not gate.cache.leased_keys()
    assert not bench.scheduler.has_unfinished


def test_open_claims_end_with_the_engine() -> None:
    gate = Gate(1, "ab")
    bench = Bench(gate=gate)
    bench.add(3, 100, "a")
    bench.step()
    claim = SlotClaim("b", lambda: None)
    bench.scheduler.claims.append(claim)

    bench.scheduler.fail_claims(RuntimeError("over"))

    with pytest.raises(RuntimeError, match="over"):
        claim.outcome.result(timeout=0)
