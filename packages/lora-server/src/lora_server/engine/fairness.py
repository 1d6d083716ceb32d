"""How many tokens each adapter has had lately, so that the one that had fewest goes first.

A counter for each adapter that has work, the base being one more, as in "Fairness in Serving Large
Language Models" (Sheng et al., 2024): virtual token counters. Knows nothing of slots or blocks.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_BASE = ""
"""Counter of the requests without an adapter; no digest is empty."""


class Waiting(Protocol):
    """Who waits for a turn."""

    @property
    def adapter_digests(self) -> frozenset[str]:
        """Which adapters; empty for the base."""

    @property
    def arrival(self) -> int:
        """Position in the order of arrival; no two have the same."""


W = TypeVar("W", bound=Waiting)


class TokenShares:
    """Counters of computed tokens. Owned by the engine thread."""

    def __init__(self, *, max_credit: int) -> None:
        """Start with no counter.

        Args:
            max_credit: tokens by which the last may be behind the first. Whoever asked for little
                for a long time can go before the others for so many tokens, and no longer.
        """
        self._max_credit = max_credit
        self._served: dict[str, int] = {}

    def settle(self, active: Iterable[frozenset[str]]) -> None:
        """Say whose requests are unfinished; the counters of the others are forgotten.

        Args:
            active: the adapters of each unfinished request. A new one starts level with the one
                that had fewest, so that nobody gains by staying away.
        """
        names = {name for digests in active for name in digests or (_BASE,)}
        known = [count for name, count in self._served.items() if name in names]
        least = max(known, default=0) - self._max_credit
        start = max(min(known, default=0), least)
        self._served = {name: max(self._served.get(name, start), least) for name in names}

    def level(self, digests: frozenset[str]) -> int:
        """Tokens that count for a request: those of the member of its set that had most."""
        return max(self._served.get(name, 0) for name in digests or (_BASE,))

    def charge(self, digests: frozenset[str], num_tokens: int) -> None:
        """Count tokens of a request for each adapter of its set."""
        for name in digests or (_BASE,):
            self._served[name] = self._served.get(name, 0) + num_tokens

    def in_turn(self, sequences: Sequence[W]) -> Iterator[W]:
        """Yield sequences, those of the adapter that had fewest tokens first.

        What is charged between two of them counts for the next. Within an adapter their order
        stays.
        """
        groups: dict[frozenset[str], list[W]] = {}
        for sequence in reversed(sequences):
            groups.setdefault(sequence.adapter_digests, []).append(sequence)
        heap: list[tuple[int, int, list[W]]] = []
        for group in groups.values():
            self._push(heap, group)
        while heap:
            _, _, group = heappop(heap)
            yield group.pop()
            if group:
                self._push(heap, group)

    def _push(self, heap: list[tuple[int, int, list[W]]], group: list[W]) -> None:
        # Arrivals are distinct, so that lists are never compared.
        heappush(heap, (self.level(group[-1].adapter_digests), group[-1].arrival, group))
