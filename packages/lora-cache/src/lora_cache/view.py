"""The read-only side of a cache: what is where, what is held, what would fit.

Every answer is without effect, the order of use included. Knows nothing of how anything changes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Generic, TypeVar

from lora_cache.errors import UnknownKeyError
from lora_cache.host import HostTier
from lora_cache.slots import Move, SlotTable
from lora_cache.stats import CacheStats, TierCounters
from lora_cache.tiers import EvictionPolicy, Residency

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class CacheView(Generic[K, V]):
    """Both tiers and the books over them, and all questions about them.

    Made only as the base of an `AdapterCache`; name it where code may look but not change. Answers
    hold until the next call that changes the cache.
    """

    def __init__(
        self, *, num_slots: int, max_host: int, max_host_bytes: int | None, policy: EvictionPolicy
    ) -> None:
        """Make empty tiers; arguments and errors as `AdapterCache`."""
        if problems := _limit_problems(num_slots, max_host, max_host_bytes):
            raise ValueError("; ".join(problems))
        self._policy = policy
        self._slots: SlotTable[K] = SlotTable(num_slots)
        self._host: HostTier[K, V] = HostTier(
            max_entries=max_host, max_bytes=max_host_bytes, policy=policy
        )
        self._draining: set[K] = set()  # removed, but still leased
        self._device_counters = TierCounters()
        self._host_counters = TierCounters()
        self._num_leases = 0
        self._refusals = 0
        self._num_clears = 0

    def __contains__(self, key: object) -> bool:
        return key in self._host and key not in self._draining

    def __len__(self) -> int:
        return len(self._host) - len(self._draining)

    def __iter__(self) -> Iterator[K]:
        return iter(self.keys())

    def __repr__(self) -> str:
        return f"AdapterCache({self._slots!r}, {self._host!r})"

    @property
    def num_slots(self) -> int:
        """Device slots in all."""
        return self._slots.num_slots

    @property
    def layout_version(self) -> int:
        """Grows with every change of which key sits in which slot, and with `clear`.

        Two equal values mean that every key is where it was and holds what it held.
        """
        return self._slots.version + self._num_clears

    def keys(self) -> tuple[K, ...]:
        """Return the registered keys, least recently used first."""
        return tuple(key for key in self._host if key not in self._draining)

    def slots(self) -> tuple[K | None, ...]:
        """Return the key in each slot, `num_slots` items, None for a free one."""
        return self._slots.slots()

    def active_keys(self) -> tuple[K, ...]:
        """Return the keys in slots, least recently used first, draining ones included."""
        return self._slots.keys()

    def pinned_keys(self) -> tuple[K, ...]:
        """Return the pinned keys, in the order in which they were pinned."""
        return self._slots.pinned

    def leased_keys(self) -> dict[K, int]:
        """Return each leased key with the number of leases that hold it."""
        return dict(self._slots.leased)

    def draining_keys(self) -> frozenset[K]:
        """Return the keys that are removed and wait for their last lease to end."""
        return frozenset(self._draining)

    def placing_keys(self) -> dict[K, int]:
        """Return the keys that are being written into slots, with the slots; see `begin`."""
        return dict(self._slots.reserved)

    def get(self, key: K) -> V:
        """Return the value of `key`.

        Raises:
            UnknownKeyError: `key` is not registered.
        """
        if key not in self:
            raise UnknownKeyError([key])
        return self._host.get(key)

    def slot_of(self, key: K) -> int | None:
        """Return the slot `key` sits in, or None. A draining key is still in its slot."""
        return self._slots.slot_of(key)

    def residency(self, key: K) -> Residency:
        """Return where `key` is now; a key this cache does not know can only be on disk."""
        if key in self._slots:
            return Residency.DEVICE
        return Residency.HOST if key in self._host else Residency.DISK

    def is_pinned(self, key: K) -> bool:
        """Whether `key` is pinned."""
        return self._slots.is_pinned(key)

    def can_admit(self, keys: Collection[K]) -> bool:
        """Whether `acquire(keys)` and `begin(keys)` would succeed now; pins and leases count.

        The answer holds until the next call that changes the cache. Unknown keys: False.
        """
        wanted = dict.fromkeys(keys)
        if not all(key in self for key in wanted):
            return False
        return self._plan(wanted) is not None

    def fits_beside_pins(self, keys: Collection[K]) -> bool:
        """Whether the set fits into the slots once every lease has ended.

        If not, waiting does not help: only `unpin` makes room. Says nothing about whether the keys
        are registered.
        """
        return len(set(keys).union(self._slots.pinned)) <= self._slots.num_slots

    def stats(self) -> CacheStats:
        """Return a snapshot of counters and state."""
        return CacheStats(
            device=self._device_counters.snapshot(),
            host=self._host_counters.snapshot(),
            refusals=self._refusals,
            num_slots=self._slots.num_slots,
            slots_used=len(self._slots),
            slots_pinned=len(self._slots.pinned),
            slots_leased=len(self._slots.leased),
            slots_draining=len(self._draining),
            slots_placing=len(self._slots.reserved),
            num_leases=self._num_leases,
            device_bytes=sum(self._host.size_of(key) for key in self._slots),
            host_entries=len(self._host),
            max_host=self._host.max_entries,
            host_bytes=self._host.num_bytes,
            max_host_bytes=self._host.max_bytes,
            layout_version=self.layout_version,
        )

    def _plan(self, wanted: Mapping[K, None]) -> tuple[Move[K], ...] | None:
        """Say how the absent members of a set would get slots under the policy, if at all."""
        return self._slots.plan(wanted, evict=self._policy is EvictionPolicy.LRU)


def _limit_problems(num_slots: int, max_host: int, max_host_bytes: int | None) -> list[str]:
    """Return what is wrong with a cache's limits, all of it."""
    problems = []
    if num_slots < 1:
        problems.append(f"num_slots is {num_slots}, expected at least 1")
    if max_host < max(num_slots, 1):
        problems.append(f"max_host is {max_host}, expected at least num_slots ({num_slots})")
    if max_host_bytes is not None and max_host_bytes < 1:
        problems.append(f"max_host_bytes is {max_host_bytes}, expected at least 1 or None")
    return problems
