"""The host tier: values in main memory, limited in number and in bytes.

Knows nothing of device slots. What else must stay, it is told call by call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from lora_cache.errors import HostTierFullError, InUseError, UnknownKeyError
from lora_cache.tiers import EvictionPolicy

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Entry(NamedTuple, Generic[V]):
    """A value and what it costs."""

    value: V
    size_bytes: int


class HostTier(Generic[K, V]):
    """At most `max_entries` values of at most `max_bytes` together, in the order of their use.

    Pinned entries are passed over when room is made. Like `SlotTable` it plans before it acts:
    `plan_room` says who would have to go, `add` carries that out.
    """

    def __init__(
        self,
        *,
        max_entries: int,
        max_bytes: int | None = None,
        policy: EvictionPolicy = EvictionPolicy.LRU,
    ) -> None:
        """Make an empty tier.

        Args:
            max_entries: how many values it may hold.
            max_bytes: how many bytes they may have together; None for no limit.
            policy: whether a full tier evicts or raises.

        Raises:
            ValueError: a limit is below 1.
        """
        if max_entries < 1:
            raise ValueError(f"max_entries is {max_entries}, expected at least 1")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}, expected at least 1 or None")
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._policy = policy
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()  # least recently used first
        self._pinned: set[K] = set()
        self._num_bytes = 0

    @property
    def max_entries(self) -> int:
        """The limit on entries."""
        return self._max_entries

    @property
    def max_bytes(self) -> int | None:
        """The limit on bytes; None for no limit."""
        return self._max_bytes

    @property
    def num_bytes(self) -> int:
        """Sizes of all entries added up."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __repr__(self) -> str:
        return f"HostTier({list(self._entries)!r}, {self._num_bytes} bytes)"

    def keys(self) -> tuple[K, ...]:
        """Return the keys, least recently used first."""
        return tuple(self._entries)

    def get(self, key: K) -> V:
        """Return the value of `key`; looking does not count as use.

        Raises:
            UnknownKeyError: `key` is not here.
        """
        self._require(key)
        return self._entries[key].value

    def size_of(self, key: K) -> int:
        """Return the bytes `key` costs.

        Raises:
            UnknownKeyError: `key` is not here.
        """
        self._require(key)
        return self._entries[key].size_bytes

    def plan_room(self, key: K, *, size_bytes: int, keep: Container[K] = ()) -> tuple[K, ...]:
        """Say who would have to go for `key` to come in; changes nothing.

        An old version of `key` itself counts as gone.

        Args:
            key: who comes in.
            size_bytes: what it costs.
            keep: who may not go, beside the pinned ones.

        Returns:
            The victims, least recently used first.

        Raises:
            HostTierFullError: the entry alone is over the budget, or those that must stay leave no
                room, or there is no room and the policy is strict.
            ValueError: `size_bytes` is negative.
        """
        if size_bytes < 0:
            raise ValueError(f"size_bytes of {key!r} is {size_bytes}, expected at least 0")
        others = [other for other in self._entries if other != key]
        old_bytes = self._entries[key].size_bytes if key in self._entries else 0
        excess_entries = len(others) + 1 - self._max_entries
        excess_bytes = 0
        if self._max_bytes is not None:
            excess_bytes = self._num_bytes - old_bytes + size_bytes - self._max_bytes
        victims: list[K] = []
        kept: list[K] = []
        for other in others:
            if excess_entries <= 0 and excess_bytes <= 0:
                break
            if self._policy is EvictionPolicy.STRICT or other in self._pinned or other in keep:
                kept.append(other)
                continue
            victims.append(other)
            excess_entries -= 1
            excess_bytes -= self._entries[other].size_bytes
        if excess_entries > 0 or excess_bytes > 0:
            raise HostTierFullError(
                key=key,
                size_bytes=size_bytes,
                num_bytes=self._num_bytes,
                max_bytes=self._max_bytes,
                num_entries=len(self._entries),
                max_entries=self._max_entries,
                kept=kept,
            )
        return tuple(victims)

    def add(self, key: K, value: V, *, size_bytes: int, keep: Container[K] = ()) -> tuple[K, ...]:
        """Put `value` in as the most recently used entry, evicting who has to go.

        An old version of `key` is dropped first; a pin on it stays.

        Args:
            key: who comes in.
            value: what is kept for it.
            size_bytes: what it costs.
            keep: who may not go, beside the pinned ones.

        Returns:
            Who was evicted, least recently used first.

        Raises:
            HostTierFullError: there is no room; nothing changed.
            ValueError: `size_bytes` is negative; nothing changed.
        """
        victims = self.plan_room(key, size_bytes=size_bytes, keep=keep)
        for gone in (key, *victims):
            if gone in self._entries:
                self._num_bytes -= self._entries.pop(gone).size_bytes
        self._entries[key] = _Entry(value, size_bytes)
        self._num_bytes += size_bytes
        return victims

    def remove(self, key: K) -> None:
        """Drop `key`.

        Raises:
            UnknownKeyError: `key` is not here.
            InUseError: `key` is pinned.
        """
        self._require(key)
        if key in self._pinned:
            raise InUseError(key=key, num_leases=0, is_pinned=True)
        self._num_bytes -= self._entries.pop(key).size_bytes

    def touch(self, keys: Iterable[K]) -> None:
        """Make `keys` the most recently used ones, the last of them the most recent.

        Raises:
            UnknownKeyError: some are not here; no order changes then.
        """
        used = tuple(keys)
        if absent := [key for key in used if key not in self._entries]:
            raise UnknownKeyError(absent)
        for key in used:
            self._entries.move_to_end(key)

    def pin(self, key: K) -> None:
        """Pass over `key` when room is made, until `unpin`; pinning again changes nothing.

        Raises:
            UnknownKeyError: `key` is not here.
        """
        self._require(key)
        self._pinned.add(key)

    def unpin(self, key: K) -> None:
        """Let `key` go again; a key that is not pinned stays as it is."""
        self._pinned.discard(key)

    def is_pinned(self, key: K) -> bool:
        """Whether `key` is pinned."""
        return key in self._pinned

    def _require(self, key: K) -> None:
        """Raise `UnknownKeyError` unless `key` is here."""
        if key not in self._entries:
            raise UnknownKeyError([key])
