"""The handle a caller holds while a set of keys must stay where it is.

Knows nothing of slots beyond their numbers; what a release means is decided by whoever made it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType, TracebackType
from typing import Generic, Self, TypeVar

K = TypeVar("K", bound=Hashable)


class Lease(Generic[K]):
    """Holds keys in their slots until it is released; a context manager that releases on exit.

    While it is held none of its keys is evicted, moved, overwritten or freed, not even when one is
    removed meanwhile. Several leases may hold the same key. A lease that is never released holds
    its keys for ever.
    """

    __slots__ = ("_release", "_slots")

    def __init__(self, slots: dict[K, int], release: Callable[[Mapping[K, int]], None]) -> None:
        """Make a lease over `slots`; `release` is called once, with them, when it ends."""
        self._slots: Mapping[K, int] = MappingProxyType(slots)
        self._release: Callable[[Mapping[K, int]], None] | None = release

    @property
    def slots(self) -> Mapping[K, int]:
        """The slot of each key, read-only. After the release the numbers mean nothing."""
        return self._slots

    @property
    def is_released(self) -> bool:
        """Whether the keys have been given back."""
        return self._release is None

    def release(self) -> None:
        """Give the keys back. Releasing again does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release(self._slots)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self.is_released else "held"
        return f"Lease({dict(self._slots)!r}, {state})"
