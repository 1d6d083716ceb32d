"""Random sequences of calls against naive models: the slot table and the host tier."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lora_cache import EvictionPolicy, HostTier, HostTierFullError, InUseError, SlotTable

KEYS = st.sampled_from("abcdefg")
SETS = st.sets(KEYS, min_size=1, max_size=5).map(sorted)
SIZES = st.integers(min_value=0, max_value=12)


class SlotTableMachine(RuleBasedStateMachine):
    """A table against a list of slots, a list of keys by use, a list of pins, a list of holds."""

    @initialize(num_slots=st.integers(min_value=1, max_value=4))
    def start(self, num_slots: int) -> None:
        self.table: SlotTable[str] = SlotTable(num_slots)
        self.slots: list[str | None] = [None] * num_slots
        self.by_use: list[str] = []
        self.pins: list[str] = []
        self.holds: list[str] = []
        self.reserved: dict[str, int] = {}

    def used(self, key: str) -> None:
        self.by_use.remove(key)
        self.by_use.append(key)

    @rule(keys=SETS, evict=st.booleans())
    def bring_in(self, keys: list[str], evict: bool) -> None:
        """Plan a set and carry the plan out; the model knows who has to go."""
        absent = [key for key in keys if key not in self.slots]
        taken = self.reserved.values()
        free = [s for s, key in enumerate(self.slots) if key is None and s not in taken]
        may_go = [
            key
            for key in self.by_use
            if evict and key not in (*keys, *self.pins, *self.holds) and key in self.slots
        ]
        rest = iter(free + [self.slots.index(key) for key in may_go])
        # A reserved key goes where it has reserved, the others where there is room.
        found = [self.reserved[key] if key in self.reserved else next(rest, None) for key in absent]
        expected_slots = [slot for slot in found if slot is not None]

        moves = self.table.plan(dict.fromkeys(keys), evict=evict)

        if len(expected_slots) < len(absent):
            assert moves is None
            return
        assert moves is not None
        assert [(move.key, move.slot) for move in moves] == list(
            zip(absent, expected_slots, strict=True)
        )
        for move in moves:
            assert move.victim == self.slots[move.slot]
            if move.victim is not None:
                assert self.table.free(move.victim) == move.slot
                self.by_use.remove(move.victim)
            self.table.assign(move.key, move.slot)
            self.reserved.pop(move.key, None)
            self.slots[move.slot] = move.key
            self.by_use.append(move.key)

    @rule(key=KEYS)
    def reserve(self, key: str) -> None:
        """Keep the lowest free slot for a key that is in none."""
        taken = self.reserved.values()
        free = [s for s, held in enumerate(self.slots) if held is None and s not in taken]
        if key in self.slots or key in self.reserved or not free:
            with pytest.raises(ValueError, match="slot"):
                self.table.reserve(key, free[0] if free else 0)
            return

        self.table.reserve(key, free[0])

        self.reserved[key] = free[0]

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def hold_or_give_up_a_reservation(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.reserved)))
        version = self.table.version

        if data.draw(st.booleans()):
            self.table.hold([key])
            self.holds.append(key)
        elif key in self.holds:
            with pytest.raises(InUseError):
                self.table.free(key)
        else:
            assert self.table.free(key) == self.reserved.pop(key)
        assert self.table.version == version

    @precondition(lambda self: self.by_use)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.by_use))
        version = self.table.version

        if key in self.pins or key in self.holds:
            with pytest.raises(InUseError):
                self.table.free(key)
            assert self.table.version == version
            return
        assert self.table.free(key) == self.slots.index(key)

        assert self.table.version > version
        self.slots[self.slots.index(key)] = None
        self.by_use.remove(key)

    @precondition(lambda self: self.by_use)
    @rule(data=st.data())
    def touch_pin_unpin_or_hold(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.by_use))
        verb = data.draw(st.sampled_from(["touch", "pin", "unpin", "hold"]))
        version = self.table.version

        getattr(self.table, verb)(key)

        assert self.table.version == version
        if verb in ("touch", "hold"):
            self.used(key)
        if verb == "hold":
            self.holds.append(key)
        if verb == "pin" and key not in self.pins:
            self.pins.append(key)
        if verb == "unpin" and key in self.pins:
            self.pins.remove(key)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.holds))

        self.table.let_go(key)

        self.holds.remove(key)

    @invariant()
    def the_table_equals_the_model(self) -> None:
        assert self.table.slots() == tuple(self.slots)
        assert self.table.keys() == tuple(self.by_use)
        assert self.table.pinned == tuple(self.pins)
        assert self.table.leased == {key: self.holds.count(key) for key in self.holds}
        assert len(self.table) == len(self.by_use)
        held = [key for key in self.slots if key is not None]
        assert len(held) == len(set(held))
        assert self.table.reserved == self.reserved
        assert set(self.pins) <= set(held)
        assert set(self.holds) <= {*held, *self.reserved}


@dataclass
class ModelEntry:
    """What the model of the host tier knows of an entry."""

    key: str
    size_bytes: int
    version: int


class HostTierMachine(RuleBasedStateMachine):
    """A tier against a list of entries by use."""

    @initialize(
        max_entries=st.integers(min_value=1, max_value=5),
        max_bytes=st.none() | st.integers(min_value=1, max_value=25),
        policy=st.sampled_from(EvictionPolicy),
    )
    def start(self, max_entries: int, max_bytes: int | None, policy: EvictionPolicy) -> None:
        self.tier: HostTier[str, int] = HostTier(
            max_entries=max_entries, max_bytes=max_bytes, policy=policy
        )
        self.max_entries = max_entries
        self.max_bytes = float("inf") if max_bytes is None else max_bytes
        self.is_strict = policy is EvictionPolicy.STRICT
        self.entries: list[ModelEntry] = []
        self.pins: set[str] = set()
        self.version = 0

    def fits(self, entries: list[ModelEntry]) -> bool:
        total_bytes = sum(entry.size_bytes for entry in entries)
        return len(entries) <= self.max_entries and total_bytes <= self.max_bytes

    @rule(key=KEYS, size_bytes=SIZES, keep=st.sets(KEYS, max_size=2))
    def add(self, key: str, size_bytes: int, keep: set[str]) -> None:
        self.version += 1
        after = [entry for entry in self.entries if entry.key != key]
        after.append(ModelEntry(key, size_bytes, self.version))
        stays = {key, *self.pins, *keep}
        expected: list[str] = []
        while not self.fits(after):
            may_go = [entry for entry in after if entry.key not in stays]
            if self.is_strict or not may_go:
                with pytest.raises(HostTierFullError) as caught:
                    self.tier.add(key, self.version, size_bytes=size_bytes, keep=keep)
                assert set(caught.value.kept) <= set(self.tier)
                return
            expected.append(may_go[0].key)
            after.remove(may_go[0])

        evicted = self.tier.add(key, self.version, size_bytes=size_bytes, keep=keep)

        assert list(evicted) == expected
        self.entries = after

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def touch_pin_or_unpin(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.entries))
        verb = data.draw(st.sampled_from(["touch", "pin", "unpin"]))

        getattr(self.tier, verb)(entry.key)

        if verb == "touch":
            self.entries.remove(entry)
            self.entries.append(entry)
        if verb == "pin":
            self.pins.add(entry.key)
        if verb == "unpin":
            self.pins.discard(entry.key)

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.entries))

        if entry.key in self.pins:
            with pytest.raises(InUseError):
                self.tier.remove(entry.key)
            return
        self.tier.remove(entry.key)

        self.entries.remove(entry)

    @invariant()
    def the_tier_equals_the_model(self) -> None:
        assert self.tier.keys() == tuple(entry.key for entry in self.entries)
        assert [self.tier.get(entry.key) for entry in self.entries] == [
            entry.version for entry in self.entries
        ]
        assert self.tier.num_bytes == sum(entry.size_bytes for entry in self.entries)
        assert self.tier.num_bytes <= self.max_bytes
        assert len(self.tier) <= self.max_entries
        assert self.pins <= set(self.tier)


MACHINE_SETTINGS = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

TestSlotTable = SlotTableMachine.TestCase
TestSlotTable.settings = MACHINE_SETTINGS
TestHostTier = HostTierMachine.TestCase
TestHostTier.settings = MACHINE_SETTINGS
