"""How often a request finds its adapter in a slot and in host memory, and how many that takes.

The two tiers are those of the service, with nothing in them: requests come one after the other, so
that waits, pins and leases play no part.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_cache import AdapterCache
from lora_server.engine.simulation import NoCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRate:
    """One size of a tier."""

    count: int
    """Slots, or adapters in host memory."""
    hit_rate: float
    """Share of the requests whose adapter was there."""
    size_bytes: int
    """What so many take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierAdvice:
    """One tier over its sizes."""

    rates: tuple[TierRate, ...]
    """By count: powers of two, the configured one, and the smallest that is enough."""
    smallest: TierRate | None
    """The fewest with the hit rate aimed at; None where no number has it."""
    configured: TierRate


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficAdvice:
    """What the traffic needs."""

    num_requests: int
    """Requests that were counted."""
    num_adapters: int
    """Adapters among them."""
    target_hit_rate: float
    slots: TierAdvice
    host: TierAdvice


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests in order, and what the service knows before them."""

    uses: Sequence[str]
    """Adapter of each request."""
    known: Sequence[str]
    """Adapters loaded at start, in that order; they are in host memory as far as it goes."""
    num_warm_up: int = 0
    """First requests that only fill the tiers."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every adapter that occurs."""
        return tuple(dict.fromkeys((*self.known, *self.uses)))


def simulate(traffic: Traffic, *, num_slots: int, max_host: int) -> tuple[float, float]:
    """Send the requests through both tiers.

    Returns:
        Share of the counted requests whose adapter was in a slot, and in host memory.
    """
    cache: AdapterCache[str, str] = AdapterCache(
        placer=NoCopies(), num_slots=num_slots, max_host=max(max_host, num_slots)
    )
    for name in traffic.known:
        cache.register(name, name, size_bytes=1)
    in_slot = in_host = 0
    for index, name in enumerate(traffic.uses):
        if index == traffic.num_warm_up:
            in_slot = in_host = 0
        if name in cache:
            in_host += 1
            cache.touch([name])
        else:
            cache.register(name, name, size_bytes=1)
        in_slot += cache.slot_of(name) is not None
        cache.activate(name)
    counted = len(traffic.uses) - traffic.num_warm_up
    return in_slot / counted, in_host / counted


def advise(
    traffic: Traffic,
    *,
    target: float,
    num_slots: int,
    max_host: int,
    slot_bytes: int,
    adapter_bytes: int,
) -> TrafficAdvice:
    """Try sizes of both tiers.

    Args:
        traffic: the requests.
        target: hit rate aimed at, above 0 and at most 1.
        num_slots: slots as configured.
        max_host: adapters in host memory as configured.
        slot_bytes: of one slot.
        adapter_bytes: of one adapter in host memory.
    """
    count = len(traffic.names)

    def slot_rate(slots: int) -> float:
        return simulate(traffic, num_slots=slots, max_host=max(count, slots))[0]

    def host_rate(entries: int) -> float:
        return simulate(traffic, num_slots=min(num_slots, entries), max_host=entries)[1]

    return TrafficAdvice(
        num_requests=len(traffic.uses) - traffic.num_warm_up,
        num_adapters=len(set(traffic.uses)),
        target_hit_rate=target,
        slots=_explore(slot_rate, count, target, configured=num_slots, each=slot_bytes),
        host=_explore(host_rate, count, target, configured=max_host, each=adapter_bytes),
    )


def _explore(
    rate_of: Callable[[int], float], most: int, target: float, *, configured: int, each: int
) -> TierAdvice:
    """Find the hit rate of some sizes, and the smallest size that is enough.

    A larger LRU tier holds all that a smaller one does, so that rates never fall with the size.
    """
    known: dict[int, float] = {}

    def rate(count: int) -> float:
        held = min(count, most)
        if held not in known:
            known[held] = rate_of(held)
        return known[held]

    def row(count: int) -> TierRate:
        return TierRate(count=count, hit_rate=rate(count), size_bytes=count * each)

    smallest = None
    if rate(most) >= target:
        smallest = 1 + bisect.bisect_left(range(1, most + 1), target, key=rate)
    powers = [1 << power for power in range(most.bit_length())]
    counts = {*powers, most, configured, *([smallest] if smallest else [])}
    return TierAdvice(
        rates=tuple(row(count) for count in sorted(counts)),
        smallest=None if smallest is None else row(smallest),
        configured=row(configured),
    )
