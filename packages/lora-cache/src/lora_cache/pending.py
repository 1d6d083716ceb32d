"""The leases that wait for keys to be written into slots, by key.

Knows nothing of slots or values; told what came of each write, it tells the leases.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from lora_cache.lease import Lease

K = TypeVar("K", bound=Hashable)


class PendingLeases(Generic[K]):
    """Leases that are not ready, under every key they wait for. Internal to the package."""

    def __init__(self) -> None:
        """Make one that nobody waits in."""
        self._waiting: dict[K, list[Lease[K]]] = {}

    def add(self, lease: Lease[K], keys: Iterable[K]) -> None:
        """Let `lease` wait for `keys`."""
        for key in keys:
            self._waiting.setdefault(key, []).append(lease)

    def placed(self, key: K) -> None:
        """Tell those who wait for `key` that it is in its slot."""
        for lease in self._waiting.pop(key, ()):
            lease.note_placed(key)

    def failed(self, key: K, error: Exception) -> None:
        """End the leases that wait for `key`."""
        for lease in self._waiting.pop(key, ()):
            if not lease.is_released:
                lease.fail(error)
