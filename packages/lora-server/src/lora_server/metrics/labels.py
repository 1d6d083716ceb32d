"""Which adapters have series of their own: those with most requests, up to a limit.

The others share one label. Who gets or loses a label is decided between two scrapes only, and what
was counted under the shared label stays there, so that no counter ever goes back. Thread-safety is
the caller's.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

BASE_LABEL: Final = "base"
"""Value of `adapter` for requests without one."""
WEIGHTED_LABEL: Final = "weighted_set"
"""Value of `adapter` for requests that combine several."""
OTHER_LABEL: Final = "other"
"""Shared by all adapters beyond the number that have a label of their own."""

_NOT_ADAPTERS: Final = frozenset({BASE_LABEL, WEIGHTED_LABEL, OTHER_LABEL})
_LEAD: Final = 1.25
"""How many times the requests of the least used label an adapter needs to take its place: series
that change hands at every scrape would tell nothing."""


class AdapterLabels:
    """Names of adapters to values of the label `adapter`."""

    def __init__(self, max_labels: int) -> None:
        """Give at most `max_labels` names a label of their own."""
        self._max_labels = max_labels
        self._named: dict[str, None] = {}
        self._requests: Counter[str] = Counter()
        """Requests of every adapter that is served, with a label or without."""

    @property
    def named(self) -> tuple[str, ...]:
        """Adapters that have series now."""
        return tuple(self._named)

    def count(self, name: str) -> str:
        """Count a request and return the label under which it is counted."""
        if name in _NOT_ADAPTERS:
            return name
        self._requests[name] += 1
        if name in self._named:
            return name
        if len(self._named) >= self._max_labels:
            return OTHER_LABEL
        self._named[name] = None
        return name

    def settle(self, served: Collection[str]) -> list[str]:
        """Forget adapters that are gone, and give labels to those that have overtaken others.

        Args:
            served: names of all adapters that there are.

        Returns:
            Names that have lost their label; their series must be removed.
        """
        lost = [name for name in self._named if name not in served]
        for name in lost:
            del self._named[name]
        for name in [name for name in self._requests if name not in served]:
            del self._requests[name]
        return lost + self._promote()

    def _promote(self) -> list[str]:
        lost: list[str] = []
        waiting = [name for name in self._requests if name not in self._named]
        waiting.sort(key=self._requests.__getitem__, reverse=True)
        for name in waiting:
            if len(self._named) >= self._max_labels:
                least = min(self._named, key=self._requests.__getitem__)
                if self._requests[name] < _LEAD * self._requests[least]:
                    break
                del self._named[least]
                lost.append(least)
            self._named[name] = None
        return lost
