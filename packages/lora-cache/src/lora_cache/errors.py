"""What a cache refuses, and with which facts.

CacheError
    UnknownKeyError (LookupError)
    SetTooLargeError (ValueError)
    NoFreeSlotError (RuntimeError)
    HostTierFullError (RuntimeError)
    InUseError (RuntimeError)
    NoPinsError (RuntimeError)
    RemovingError (RuntimeError)
    LoadFailedError (RuntimeError)

Each carries its facts as attributes; the text is made from them here. Every refusal leaves the
cache as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

_MAX_NAMES = 8
"""Keys a message spells out; all of them are in the attributes."""


def _names(keys: Sequence[Hashable]) -> str:
    """Return the keys as a list for a message, or `none`."""
    names = [repr(key) for key in keys[:_MAX_NAMES]]
    if len(keys) > _MAX_NAMES:
        names.append(f"{len(keys) - _MAX_NAMES} more")
    return ", ".join(names) or "none"


class CacheError(Exception):
    """Base of every error this package raises."""


class UnknownKeyError(CacheError, LookupError):
    """Some keys are not registered, or are already removed; `keys` names all of them."""

    def __init__(self, keys: Iterable[Hashable]) -> None:
        self.keys = tuple(keys)
        super().__init__(f"not registered: {_names(self.keys)}")


class SetTooLargeError(CacheError, ValueError):
    """One set has more distinct keys than there are slots, so it can never be acquired."""

    def __init__(self, *, num_keys: int, num_slots: int) -> None:
        self.num_keys = num_keys
        self.num_slots = num_slots
        super().__init__(f"the set has {num_keys} distinct keys, the table has {num_slots} slots")


class NoFreeSlotError(CacheError, RuntimeError):
    """The slots that are not pinned or leased do not suffice.

    `is_blocked_by_pins` tells whether waiting can help: when true, the set would not fit even after
    the last lease has ended, and only unpinning makes room.
    """

    def __init__(
        self,
        *,
        keys: Iterable[Hashable],
        num_slots: int,
        pinned: Iterable[Hashable],
        leased: Iterable[Hashable],
        is_blocked_by_pins: bool,
    ) -> None:
        self.keys = tuple(keys)
        self.num_slots = num_slots
        self.pinned = tuple(pinned)
        self.leased = tuple(leased)
        self.is_blocked_by_pins = is_blocked_by_pins
        super().__init__(
            f"no free adapter slots for {_names(self.keys)}: {num_slots} in all; "
            f"pinned: {_names(self.pinned)}; leased: {_names(self.leased)}"
        )


class HostTierFullError(CacheError, RuntimeError):
    """The host tier cannot take the entry beside those it must keep.

    `kept` names the entries that may not be evicted: pinned or leased ones, or all of them when the
    policy evicts nothing.
    """

    def __init__(
        self,
        *,
        key: Hashable,
        size_bytes: int,
        num_bytes: int,
        max_bytes: int | None,
        num_entries: int,
        max_entries: int,
        kept: Iterable[Hashable],
    ) -> None:
        self.key = key
        self.size_bytes = size_bytes
        self.num_bytes = num_bytes
        self.max_bytes = max_bytes
        self.num_entries = num_entries
        self.max_entries = max_entries
        self.kept = tuple(kept)
        super().__init__(self._text())

    def _text(self) -> str:
        """Name the limit that was met, with what was asked for and what is there."""
        if self.max_bytes is not None and self.size_bytes > self.max_bytes:
            return (
                f"{self.key!r} needs {self.size_bytes} bytes, "
                f"the host tier's whole budget is {self.max_bytes} bytes"
            )
        budget = "no byte budget" if self.max_bytes is None else f"{self.max_bytes} bytes"
        return (
            f"no free adapter slots in the host tier for {self.key!r} ({self.size_bytes} bytes): "
            f"{self.num_entries} entries of {self.num_bytes} bytes there, "
            f"limits {self.max_entries} entries and {budget}; kept: {_names(self.kept)}"
        )


class InUseError(CacheError, RuntimeError):
    """The entry is pinned or leased and the call would take it away or overwrite it."""

    def __init__(self, *, key: Hashable, num_leases: int, is_pinned: bool) -> None:
        self.key = key
        self.num_leases = num_leases
        self.is_pinned = is_pinned
        pin = "pinned" if is_pinned else "not pinned"
        super().__init__(f"{key!r} is in use: held by {num_leases} leases, {pin}")


class NoPinsError(CacheError, RuntimeError):
    """The strict policy has no pins."""

    def __init__(self, key: Hashable) -> None:
        self.key = key
        super().__init__(f"{key!r}: the policy 'strict' evicts nothing and has no pins")


class RemovingError(CacheError, RuntimeError):
    """The key was removed, and leases still hold its old entry."""

    def __init__(self, *, key: Hashable, num_leases: int) -> None:
        self.key = key
        self.num_leases = num_leases
        super().__init__(f"{key!r} is being removed: {num_leases} leases still hold it")


class LoadFailedError(CacheError, RuntimeError):
    """A loader raised, or was interrupted; its error is the `__cause__`."""

    def __init__(self, *, key: Hashable, reason: str) -> None:
        self.key = key
        self.reason = reason
        super().__init__(f"loading {key!r} failed: {reason}")
