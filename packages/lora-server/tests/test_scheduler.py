"""The scheduler alone: a real pool and a real adapter cache, no model, a clock moved by hand."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from lora_server.engine.simulation import Bench, Gate

if TYPE_CHECKING:
    from lora_server.engine.sequence import SequenceState


def test_a_long_prompt_is_cut_into_chunks_and_decodes_go_on_beside_it() -> None:
    bench = Bench(budget=8)
    short = bench.add(3, 5)
    bench.step()
    long = bench.add(tuple(range(50, 70)), 1)

    steps = [bench.step() for _ in range(3)]

    assert steps == [{short: 1, long: 7}, {short: 1, long: 7}, {short: 1, long: 6}]


def test_a_prefill_and_decodes_that_fill_the_budget_take_turns() -> None:
    bench = Bench(budget=2, prefixes=False)
    decode = bench.add(1, 40)
    bench.step()
    prefill = bench.add(9, 40)

    turns = [bench.step() for _ in range(10)]

    assert sum(decode in turn for turn in turns) >= 5
    assert prefill.num_generated >= 1


def test_the_latest_arrival_gives_up_its_blocks_and_comes_back() -> None:
    bench = Bench(blocks=4, budget=16, prefixes=False)
    first = bench.add(7, 8)
    second = bench.add(tuple(range(20, 27)), 8)
    bench.step()
    assert bench.scheduler.running == [first, second]
    for _ in range(40):
        bench.step()

    assert bench.scheduler.num_preemptions >= 1
    assert first.is_finished
    assert second.is_finished
    assert second.num_generated == 8
    assert bench.pool.num_used == 0


def test_a_known_prefix_is_not_computed_again() -> None:
    bench = Bench(budget=64)
    bench.add(18, 1)
    bench.step()

    again = bench.add(18, 1)

    assert bench.step() == {again: 2}
    assert again.num_cached_tokens == 16
    assert bench.scheduler.prefix_hits == 16


def test_a_prefix_is_never_shared_with_another_adapter_or_the_base() -> None:
    bench = Bench(budget=64, gate=Gate(2, "ab"))
    bench.add(18, 1, "a")
    bench.step()

    base, other = bench.add(18, 1), bench.add(18, 1, "b")

    assert bench.step() == {base: 18, other: 18}


def test_continuations_of_one_request_share_its_prompt_blocks() -> None:
    bench = Bench(budget=64)
    leader = bench.add(18, 3)
    follower = bench.add(18, 3, leader=leader)

    first, second = bench.step(), bench.step()

    assert first == {leader: 18}
    assert second == {leader: 1, follower: 2}


def test_a_blocked_adapter_does_not_hold_up_those_behind_it() -> None:
    bench = Bench(gate=Gate(1, "abc"))
    hot = bench.add(3, 10, "a")
    bench.step()
    cold, base, same = bench.add(3, 1, "b"), bench.add(3, 1), bench.add(3, 1, "a")

    step = bench.step()

    assert set(step) == {hot, base, same}
    assert cold in bench.scheduler.waiting


def test_a_blocked_adapter_starts_within_the_configured_wait() -> None:
    bench = Bench(gate=Gate(2, "abc"), wait=2.0, seqs=32, budget=64)
    for name in "ab":
        bench.add(3, 1000, name)
    bench.step()
    cold = bench.add(3, 1, "c")
    started = None
    for step in range(30):
        bench.clock.now += 0.1
        if step % 3 == 0:
            bench.add(2, 50, "ab"[step % 2])  # the hot adapters stay busy
        if cold in bench.step():
            started = step * 0.1
            break

    assert started is not None
    assert started <= 2.2


def test_a_pinned_adapter_is_never_drained() -> None:
    gate = Gate(2, "abc")
    gate.cache.pin("a")
    bench = Bench(gate=gate, wait=0.5, budget=64)
    pinned, loose = bench.add(3, 100, "a"), bench.add(3, 100, "b")
    bench.step()
    cold = bench.add(3, 1, "c")
    bench.clock.now = 1.0
    bench.step()
    bench.clock.now = 2.0

    bench.step()

    assert pinned in bench.scheduler.running
    assert cold.is_finished
    assert loose in bench.scheduler.waiting


def test_a_finished_sequence_gives_back_everything() -> None:
    gate = Gate(1, "a")
    bench = Bench(gate=gate)
    sequence = bench.add(5, 10, "a")
    bench.step()
    assert gate.cache.leased_keys()

    bench.scheduler.finish(sequence)

    assert not gate.cache.leased_keys()
    assert bench.pool.num_used == 0
    assert not bench.scheduler.has_unfinished


@pytest.mark.parametrize("seed", range(25))
def test_random_traffic_ends_and_leaves_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    names = "abcdefgh"
    gate = Gate(rng.choice([1, 2, 3]), names)
    bench = Bench(
        blocks=rng.choice([12, 20, 40]),
        budget=rng.choice([1, 3, 8, 32]),
        seqs=rng.choice([1, 3, 8]),
        gate=gate,
        wait=rng.choice([0.0, 0.3, 2.0]),
        prefixes=rng.random() < 0.5,
    )
    sequences: list[SequenceState] = []
    for _ in range(8000):
        bench.clock.now += 0.05
        if len(sequences) < 40 and rng.random() < 0.3:
            prompt = tuple(rng.randrange(4) for _ in range(rng.randint(1, 24)))
            sequences.append(bench.add(prompt, rng.randint(1, 20), rng.choice([None, *names])))
        elif sequences and rng.random() < 0.02:
            victim = rng.choice(sequences)
            if not victim.is_finished:
                bench.scheduler.finish(victim)
        bench.step()
        leased = set(gate.cache.leased_keys())
        assert {d for s in bench.scheduler.running for d in s.adapter_digests} == leased
        if len(sequences) == 40 and not bench.scheduler.has_unfinished:
            break

    assert all(s.is_finished for s in sequences)
    assert bench.pool.num_used == 0
    assert not gate.cache.leased_keys()
