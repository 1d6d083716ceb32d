"""The handle a caller holds while a set of keys must stay where it is.

Knows nothing of slots beyond their numbers; what a release means is decided by whoever made it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MappingProxyType, TracebackType
from typing import Generic, Self, TypeVar

K = TypeVar("K", bound=Hashable)


class Lease(Generic[K]):
    """Holds keys in their slots until it is released; a context manager that releases on exit.

    While it is held none of its keys is evicted, moved, overwritten or freed, not even when one is
    removed meanwhile. Several leases may hold the same key. A lease that is never released holds
    its keys for ever.

    A lease from `AdapterCache.begin` may be held before its keys are in their slots: `is_ready`
    tells when they are, `failure` that one of them never will be.
    """

    __slots__ = ("_failure", "_placing", "_release", "_slots")

    def __init__(
        self,
        slots: dict[K, int],
        release: Callable[[Mapping[K, int]], None],
        *,
        placing: Iterable[K] = (),
    ) -> None:
        """Make a lease over `slots`.

        Args:
            slots: where each key is, or will be.
            release: called once, with `slots`, when the lease ends.
            placing: keys that are still being written into their slots.
        """
        self._slots: Mapping[K, int] = MappingProxyType(slots)
        self._release: Callable[[Mapping[K, int]], None] | None = release
        self._placing = set(placing)
        self._failure: Exception | None = None

    @property
    def slots(self) -> Mapping[K, int]:
        """The slot of each key, read-only. After the release the numbers mean nothing."""
        return self._slots

    @property
    def is_released(self) -> bool:
        """Whether the keys have been given back."""
        return self._release is None

    @property
    def is_ready(self) -> bool:
        """Whether every key is in its slot, and the lease holds it there."""
        return not self._placing and self._release is not None

    @property
    def failure(self) -> Exception | None:
        """Why a key could not be placed; the lease has ended then."""
        return self._failure

    def note_placed(self, key: K) -> None:
        """Take note that `key` is in its slot now. For the owner of the slots alone."""
        self._placing.discard(key)

    def fail(self, error: Exception) -> None:
        """End the lease because a key could not be placed. For the owner of the slots alone."""
        self._failure = error
        self.release()

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
        state = "released" if self.is_released else "held" if self.is_ready else "placing"
        return f"Lease({dict(self._slots)!r}, {state})"
