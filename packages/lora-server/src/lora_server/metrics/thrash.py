"""ThrashAlarm: says when slots change hands so often that there are too few of them.

Knows neither names nor slots: it is told of evictions and of admitted requests.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

THRASH_RATIO: Final = 0.5
"""Evictions from slots per admitted request from which on slots are too few: then every second
request waits for a slot to be written, and pays for it with the time of all others."""
_MIN_ADMITTED: Final = 20
"""Requests in the window below which nothing is said: a few of them tell nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thrash:
    """What a window looks like when there are too few slots."""

    window_s: float
    num_evictions: int
    num_admitted: int
    num_adapters: int
    """Different adapters that were admitted: as many slots would end all evictions."""


class ThrashAlarm:
    """Compares evictions with admitted requests over a sliding window. Thread-safe."""

    def __init__(self, window_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Look at the last `window_s` seconds of `clock`; a window of 0 never raises an alarm."""
        self._window_s = window_s
        self._clock = clock
        self._lock = threading.Lock()
        self._began_s: float | None = None
        """When the first request was admitted after a window without any."""
        self._evictions: deque[float] = deque()
        self._admitted: deque[tuple[float, frozenset[str]]] = deque()
        self._is_on = False

    @property
    def is_on(self) -> bool:
        """Whether slots are too few, as of now."""
        with self._lock:
            self._look()
            return self._is_on

    @property
    def ratio(self) -> float:
        """Evictions per admitted request over the window; 0 without requests."""
        with self._lock:
            self._look()
            return self._ratio()

    def evicted(self) -> None:
        """Count an adapter that left its slot for another."""
        if self._window_s:
            with self._lock:
                self._evictions.append(self._clock())

    def admitted(self, adapters: Collection[str]) -> Thrash | None:
        """Count a request that got slots for its adapters.

        Returns:
            What to warn of, when the alarm has just gone on.
        """
        if not self._window_s:
            return None
        with self._lock:
            now_s = self._clock()
            self._look()
            if self._began_s is None:
                self._began_s = now_s
            self._admitted.append((now_s, frozenset(adapters)))
            return self._raise_alarm(now_s)

    def _raise_alarm(self, now_s: float) -> Thrash | None:
        assert self._began_s is not None
        is_whole = now_s - self._began_s >= self._window_s
        if self._is_on or not is_whole or len(self._admitted) < _MIN_ADMITTED:
            return None
        if self._ratio() <= THRASH_RATIO:
            return None
        self._is_on = True
        return Thrash(
            window_s=self._window_s,
            num_evictions=len(self._evictions),
            num_admitted=len(self._admitted),
            num_adapters=len(set().union(*(adapters for _, adapters in self._admitted))),
        )

    def _look(self) -> None:
        """Forget what lies before the window; end the alarm when it no longer holds."""
        oldest_s = self._clock() - self._window_s
        while self._evictions and self._evictions[0] < oldest_s:
            self._evictions.popleft()
        while self._admitted and self._admitted[0][0] < oldest_s:
            self._admitted.popleft()
        if not self._admitted:
            self._began_s = None
        if self._ratio() <= THRASH_RATIO / 2:
            self._is_on = False

    def _ratio(self) -> float:
        return len(self._evictions) / len(self._admitted) if self._admitted else 0.0
