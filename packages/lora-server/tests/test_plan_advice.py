"""Hit rates are those of an LRU: compared with stack distances, which know nothing of our cache."""

from __future__ import annotations

import random

import pytest

from lora_server.cli.plan.advice import Traffic, advise, simulate


def stack_distances(uses: list[str]) -> list[int | None]:
    """Return, for each use, how many other names came since the last one; None for a first use."""
    distances: list[int | None] = []
    for index, name in enumerate(uses):
        before = [i for i in range(index) if uses[i] == name]
        between = uses[before[-1] + 1 : index] if before else []
        distances.append(len(set(between)) if before else None)
    return distances


@pytest.fixture
def uses() -> list[str]:
    draw = random.Random(3)
    return draw.choices("abcdefgh", [8, 5, 3, 2, 1, 1, 1, 1], k=400)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 8])
def test_a_slot_is_hit_when_fewer_others_came_between(uses: list[str], num_slots: int) -> None:
    expected = sum(d is not None and d < num_slots for d in stack_distances(uses)) / len(uses)

    found, _ = simulate(Traffic(uses=uses, known=()), num_slots=num_slots, max_host=8)

    assert found == pytest.approx(expected)


@pytest.mark.parametrize("max_host", [2, 4, 6])
def test_host_memory_is_hit_in_the_same_way_beside_smaller_slots(
    uses: list[str], max_host: int
) -> None:
    expected = sum(d is not None and d < max_host for d in stack_distances(uses)) / len(uses)

    _, found = simulate(Traffic(uses=uses, known=()), num_slots=2, max_host=max_host)

    assert found == pytest.approx(expected)


def test_adapters_loaded_at_start_are_in_host_memory_and_in_no_slot() -> None:
    traffic = Traffic(uses=["a", "b"], known=["a", "b"])

    assert simulate(traffic, num_slots=2, max_host=2) == (0.0, 1.0)


def test_the_warm_up_is_not_counted() -> None:
    traffic = Traffic(uses=["a", "b", "a", "b"], known=(), num_warm_up=2)

    assert simulate(traffic, num_slots=2, max_host=2) == (1.0, 1.0)


def test_the_smallest_number_that_is_enough_is_found(uses: list[str]) -> None:
    distances = stack_distances(uses)
    rates = {n: sum(d is not None and d < n for d in distances) / len(uses) for n in range(1, 9)}
    target = 0.8
    expected = min(n for n, rate in rates.items() if rate >= target)

    advice = advise(
        Traffic(uses=uses, known=()),
        target=target,
        num_slots=3,
        max_host=8,
        slot_bytes=1000,
        adapter_bytes=10,
    )

    assert advice.slots.smallest is not None
    assert advice.slots.smallest.count == expected
    assert advice.slots.smallest.size_bytes == expected * 1000
    assert advice.slots.configured.hit_rate == pytest.approx(rates[3])
    assert advice.host.configured.count == 8
    assert advice.host.configured.size_bytes == 80
    counts = [rate.count for rate in advice.slots.rates]
    assert counts == sorted({1, 2, 4, 8, 3, expected})
    assert [r.hit_rate for r in advice.slots.rates] == pytest.approx([rates[n] for n in counts])


def test_a_rate_out_of_reach_is_said_to_be() -> None:
    advice = advise(
        Traffic(uses=["a", "b", "a"], known=()),
        target=0.9,
        num_slots=8,
        max_host=32,
        slot_bytes=1,
        adapter_bytes=1,
    )

    assert advice.slots.smallest is None
    assert max(rate.hit_rate for rate in advice.slots.rates) == pytest.approx(1 / 3)
    assert advice.slots.configured.count == 8
