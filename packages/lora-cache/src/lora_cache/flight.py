"""Single flight: one execution for however many callers ask for the same key at the same time.

Thread-safe, and the only part of this package that is. Knows nothing of tiers: what a flight
returns is registered by the thread that owns the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from lora_cache.errors import LoadFailedError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Flight(Generic[V]):
    """One running execution."""

    __slots__ = ("leader", "num_waiting", "outcome")

    def __init__(self, leader: int) -> None:
        self.leader = leader
        self.num_waiting = 0
        self.outcome: Future[V] = Future()


class SingleFlight(Generic[K, V]):
    """Runs one function per key at a time and gives all who asked meanwhile its outcome.

    Nothing is remembered: a call after a flight has ended, well or not, starts a new one.
    """

    def __init__(self) -> None:
        """Make one with nothing in flight."""
        self._lock = threading.Lock()
        self._flights: dict[K, _Flight[V]] = {}

    def run(self, key: K, fn: Callable[[], V]) -> V:
        """Return what `fn` returns, or what the flight of `key` that is under way will return.

        The first caller runs `fn` on its own thread; the others wait for it. What `fn` raises
        is raised to all of them.

        Raises:
            LoadFailedError: the thread that ran it was interrupted (`KeyboardInterrupt`,
                `SystemExit`), and this caller was waiting; or `fn` asked for its own key.
        """
        me = threading.get_ident()
        with self._lock:
            flight = self._flights.get(key)
            is_leader = flight is None
            if flight is None:
                flight = self._flights[key] = _Flight(me)
            elif flight.leader == me:
                raise LoadFailedError(key=key, reason="it asked for itself while it was loading")
            else:
                flight.num_waiting += 1
        return self._lead(key, flight, fn) if is_leader else flight.outcome.result()

    def num_waiting(self, key: K) -> int:
        """Return how many callers wait for the flight of `key`; 0 when there is none."""
        with self._lock:
            flight = self._flights.get(key)
            return 0 if flight is None else flight.num_waiting

    def keys(self) -> frozenset[K]:
        """Return the keys in flight at this moment."""
        with self._lock:
            return frozenset(self._flights)

    def _lead(self, key: K, flight: _Flight[V], fn: Callable[[], V]) -> V:
        """Run `fn` and hand its outcome to whoever waits."""
        try:
            value = fn()
        except Exception as error:
            self._land(key)
            flight.outcome.set_exception(error)
            raise
        except BaseException as interrupt:
            # The interrupt is meant for this thread alone; the others learn that the load ended.
            failure = LoadFailedError(key=key, reason="its thread was interrupted")
            failure.__cause__ = interrupt
            self._land(key)
            flight.outcome.set_exception(failure)
            raise
        self._land(key)
        flight.outcome.set_result(value)
        return value

    def _land(self, key: K) -> None:
        """Forget the flight before its outcome is known, so that who comes later starts anew."""
        with self._lock:
            del self._flights[key]
