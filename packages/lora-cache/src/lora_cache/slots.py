"""The table of device slots: which key sits where, in which order of use, and what may go.

Residency only. Knows nothing of values, of the host tier, or of how a slot is written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

from lora_cache.errors import InUseError, UnknownKeyError

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move(Generic[K]):
    """One key on its way into one slot."""

    key: K
    """Who goes in."""
    slot: int
    """Where."""
    victim: K | None
    """Who sits there now and has to leave; None for a free slot."""


class SlotTable(Generic[K]):
    """`num_slots` slots, each free, reserved for one key or held by one; no key has two.

    Keeps the order of use, pins, and a count of leases per key. A key that is pinned or leased
    cannot be freed. The table plans, the owner acts: `plan` says which moves would bring a set in,
    `free` and `assign` carry them out, with `reserve` between them where writing takes a while.
    A reserved key is not in its slot yet: only its leases and its reservation count.
    """

    def __init__(self, num_slots: int) -> None:
        """Make a table of free slots.

        Raises:
            ValueError: `num_slots` is below 1.
        """
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}, expected at least 1")
        self._num_slots = num_slots
        self._slot_of: OrderedDict[K, int] = OrderedDict()  # least recently used first
        self._free = set(range(num_slots))
        self._reserved: dict[K, int] = {}
        self._pinned: dict[K, None] = {}  # a dict keeps the order in which pins were set
        self._num_leases: dict[K, int] = {}  # only keys with at least one lease
        self._version = 0

    @property
    def num_slots(self) -> int:
        """Slots in all."""
        return self._num_slots

    @property
    def version(self) -> int:
        """Grows with every change of which key sits in which slot, and with nothing else."""
        return self._version

    @property
    def pinned(self) -> tuple[K, ...]:
        """The pinned keys, in the order in which they were pinned."""
        return tuple(self._pinned)

    @property
    def leased(self) -> Mapping[K, int]:
        """A live, read-only view: each leased key and how many leases hold it."""
        return MappingProxyType(self._num_leases)

    @property
    def reserved(self) -> Mapping[K, int]:
        """A live, read-only view: each key on its way into a slot, and the slot."""
        return MappingProxyType(self._reserved)

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: object) -> bool:
        return key in self._slot_of

    def __iter__(self) -> Iterator[K]:
        return iter(self._slot_of)

    def __repr__(self) -> str:
        return f"SlotTable({list(self.slots())!r})"

    def keys(self) -> tuple[K, ...]:
        """Return the keys in slots, least recently used first."""
        return tuple(self._slot_of)

    def slots(self) -> tuple[K | None, ...]:
        """Return the key in each slot, `num_slots` items, None for a free one."""
        table: list[K | None] = [None] * self._num_slots
        for key, slot in self._slot_of.items():
            table[slot] = key
        return tuple(table)

    def slot_of(self, key: K) -> int | None:
        """Return the slot `key` sits in, or None."""
        return self._slot_of.get(key)

    def find(self, keys: Iterable[K]) -> dict[K, int]:
        """Return the slots of those of `keys` that are in one; changes no order."""
        slot_of = self._slot_of
        return {key: slot_of[key] for key in keys if key in slot_of}

    def plan(self, keys: Mapping[K, object], *, evict: bool) -> tuple[Move[K], ...] | None:
        """Say how the absent ones of `keys` would get a slot; changes nothing.

        A reserved key gets the slot it has reserved. For the others free slots are used first,
        lowest index first, then those of the least recently used keys that are not pinned, not
        leased and not themselves in `keys`. The plan holds until the table changes.

        Args:
            keys: the whole set, present members included; only its keys are read.
            evict: whether keys may be evicted; else only free slots count.

        Returns:
            A move for each absent key, in the order of `keys`, or None if they do not all fit.
        """
        absent = [key for key in keys if key not in self._slot_of]
        if not absent:
            return ()
        moves = {
            key: Move(key=key, slot=self._reserved[key], victim=None)
            for key in absent
            if key in self._reserved
        }
        # In both pairings either side may be the longer one.
        rest = [key for key in absent if key not in moves]
        for key, slot in zip(rest, sorted(self._free), strict=False):
            moves[key] = Move(key=key, slot=slot, victim=None)
        if len(moves) < len(absent) and evict:
            rest = [key for key in rest if key not in moves]
            for key, victim in zip(rest, self._evictable(keys), strict=False):
                moves[key] = Move(key=key, slot=self._slot_of[victim], victim=victim)
        return tuple(moves[key] for key in absent) if len(moves) == len(absent) else None

    def _evictable(self, keep: Mapping[K, object]) -> Iterator[K]:
        """Yield the keys that may go, least recently used first."""
        for key in self._slot_of:
            if not (key in self._pinned or key in self._num_leases or key in keep):
                yield key

    def reserve(self, key: K, slot: int) -> None:
        """Keep the free slot `slot` for `key`, which is written there until `assign` or `free`.

        Raises:
            ValueError: `key` has a slot already, or `slot` is not a free one.
        """
        self._take(key, slot)
        self._reserved[key] = slot

    def assign(self, key: K, slot: int) -> None:
        """Give `slot`, free or reserved for it, to `key`, as the most recently used.

        Raises:
            ValueError: `key` already has another slot, or `slot` is not a free one.
        """
        if self._reserved.get(key) == slot:
            del self._reserved[key]
        else:
            self._take(key, slot)
        self._slot_of[key] = slot
        self._version += 1

    def _take(self, key: K, slot: int) -> None:
        """Make a free slot one that is not."""
        if key in self._slot_of or key in self._reserved:
            taken = self._slot_of.get(key, self._reserved.get(key))
            raise ValueError(f"{key!r} already sits in slot {taken}")
        if slot not in self._free:
            raise ValueError(f"slot {slot} is not free: {self!r}")
        self._free.remove(slot)

    def free(self, key: K) -> int:
        """Take `key` out of its slot, or its reservation back, and return the slot.

        Raises:
            UnknownKeyError: `key` is in no slot and has reserved none.
            InUseError: `key` is pinned or leased.
        """
        self._require_place(key)
        if key in self._pinned or key in self._num_leases:
            raise InUseError(
                key=key, num_leases=self._num_leases.get(key, 0), is_pinned=key in self._pinned
            )
        if key in self._reserved:
            slot = self._reserved.pop(key)
        else:
            slot = self._slot_of.pop(key)
            self._version += 1
        self._free.add(slot)
        return slot

    def has_place(self, key: K) -> bool:
        """Whether `key` is in a slot or has reserved one."""
        return key in self._slot_of or key in self._reserved

    def touch(self, key: K) -> None:
        """Make `key` the most recently used one.

        Raises:
            UnknownKeyError: `key` is in no slot.
        """
        self._require(key)
        self._slot_of.move_to_end(key)

    def pin(self, key: K) -> None:
        """Keep `key` in its slot until `unpin`; pinning again changes nothing.

        Raises:
            UnknownKeyError: `key` is in no slot.
        """
        self._require(key)
        self._pinned[key] = None

    def unpin(self, key: K) -> None:
        """Let `key` go again; a key that is not pinned stays as it is."""
        self._pinned.pop(key, None)

    def is_pinned(self, key: K) -> bool:
        """Whether `key` is pinned."""
        return key in self._pinned

    def hold(self, keys: Iterable[K]) -> None:
        """Add one lease to each of `keys` and make those in slots the most recently used ones.

        Raises:
            UnknownKeyError: some are in no slot and have reserved none; none is held then.
        """
        held = tuple(keys)
        if absent := [key for key in held if not self.has_place(key)]:
            raise UnknownKeyError(absent)
        num_leases, slot_of = self._num_leases, self._slot_of
        for key in held:
            num_leases[key] = num_leases.get(key, 0) + 1
            if key in slot_of:
                slot_of.move_to_end(key)

    def let_go(self, keys: Iterable[K]) -> None:
        """Take one lease from each of `keys`.

        Raises:
            UnknownKeyError: some are not leased; no count changes then.
        """
        held = tuple(keys)
        if absent := [key for key in held if key not in self._num_leases]:
            raise UnknownKeyError(absent)
        for key in held:
            self._num_leases[key] -= 1
            if not self._num_leases[key]:
                del self._num_leases[key]

    def _require(self, key: K) -> None:
        """Raise `UnknownKeyError` unless `key` is in a slot."""
        if key not in self._slot_of:
            raise UnknownKeyError([key])

    def _require_place(self, key: K) -> None:
        """Raise `UnknownKeyError` unless `key` is in a slot or has reserved one."""
        if not self.has_place(key):
            raise UnknownKeyError([key])
