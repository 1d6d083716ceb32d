"""Random sequences of all calls on a cache keep what it promises (C20)."""

from __future__ import annotations

from typing import NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lora_cache import (
    CacheError,
    EvictionPolicy,
    HostTierFullError,
    InUseError,
    Lease,
    Loaded,
    LoadFailedError,
    NoFreeSlotError,
    NoPinsError,
    RemovingError,
    SetTooLargeError,
    UnknownKeyError,
)
from lora_cache.testing import CacheRig, PlacementError, RecordingLoader

KEYS = st.sampled_from("abcdefgh")
SETS = st.lists(KEYS, max_size=5)
SIZES = st.integers(min_value=0, max_value=12)


class Picture(NamedTuple):
    """All of a cache's state that a refused call may not change."""

    keys: tuple[str, ...]
    active: tuple[str, ...]
    slots: tuple[str | None, ...]
    pinned: tuple[str, ...]
    leased: dict[str, int]
    draining: frozenset[str]
    placing: dict[str, int]
    layout_version: int
    host_bytes: int


def picture(rig: CacheRig) -> Picture:
    cache = rig.cache
    return Picture(
        keys=cache.keys(),
        active=cache.active_keys(),
        slots=cache.slots(),
        pinned=cache.pinned_keys(),
        leased=cache.leased_keys(),
        draining=cache.draining_keys(),
        placing=cache.placing_keys(),
        layout_version=cache.layout_version,
        host_bytes=cache.stats().host_bytes,
    )


class AdapterCacheMachine(RuleBasedStateMachine):
    """Registers, acquires, pins and removes at random; the model is a few sets.

    What the model knows on its own: the value of each known key, the open leases, the pins, and
    that a set fits when what must stay beside it leaves enough slots.
    """

    @initialize(
        num_slots=st.integers(min_value=1, max_value=4),
        spare_host=st.integers(min_value=0, max_value=3),
        max_host_bytes=st.none() | st.integers(min_value=5, max_value=40),
        policy=st.sampled_from([EvictionPolicy.LRU] * 3 + [EvictionPolicy.STRICT]),
        allow_pin_all=st.booleans(),
    )
    def start(
        self,
        num_slots: int,
        spare_host: int,
        max_host_bytes: int | None,
        policy: EvictionPolicy,
        allow_pin_all: bool,
    ) -> None:
        self.rig = CacheRig.build(
            num_slots=num_slots,
            max_host=num_slots + spare_host,
            max_host_bytes=max_host_bytes,
            policy=policy,
            allow_pin_all=allow_pin_all,
        )
        self.cache = self.rig.cache
        self.is_strict = policy is EvictionPolicy.STRICT
        self.max_pins = num_slots if allow_pin_all else num_slots - 1
        self.values: dict[str, str] = {}
        self.leases: list[Lease[str]] = []
        self.lease_slots: list[dict[str, int]] = []
        self.pins: set[str] = set()
        self.draining: dict[str, str] = {}  # with the values they had
        self.placing: dict[str, int] = {}  # keys that are being written, with their slots
        self.num_loads = 0

    # The model.

    def leased(self) -> set[str]:
        return {key for slots in self.lease_slots for key in slots}

    def forget_failed(self) -> None:
        """Drop the leases that ended because what they waited for could not be placed."""
        ended = [lease.failure is not None for lease in self.leases]
        self.leases = [one for one, is_over in zip(self.leases, ended, strict=True) if not is_over]
        self.lease_slots = [
            slots for slots, is_over in zip(self.lease_slots, ended, strict=True) if not is_over
        ]
        self.forget_drained()

    def forget_drained(self) -> None:
        leased = self.leased()
        for key in [key for key in self.draining if key not in leased]:
            del self.draining[key]
            self.placing.pop(key, None)

    def forget_evicted(self) -> None:
        """Drop from the model what the hook says left the host tier; none of it may be held."""
        for key, tier in self.rig.hook.evicted:
            assert key not in self.leased() | self.pins
            assert not self.is_strict
            if tier == "host":
                del self.values[key]
        self.rig.hook.evicted.clear()

    def expected_error(self, keys: list[str]) -> type[CacheError] | None:
        """Say what acquiring the set must raise, from the definitions alone."""
        wanted = set(keys)
        if not wanted <= set(self.values):
            return UnknownKeyError
        num_slots = self.cache.num_slots
        if len(wanted) > num_slots:
            return SetTooLargeError
        stays = self.leased() | self.pins | set(self.placing)
        if self.is_strict:
            stays |= set(self.cache.active_keys())
        return NoFreeSlotError if len(stays | wanted) > num_slots else None

    def check_refusal(
        self, error: CacheError, expected: type[CacheError] | None, before: Picture
    ) -> None:
        assert type(error) is expected
        assert picture(self.rig) == before

    # The calls.

    @rule(key=KEYS, size_bytes=SIZES)
    def register(self, key: str, size_bytes: int) -> None:
        before = picture(self.rig)
        self.num_loads += 1
        value = f"{key} {self.num_loads}"
        if key in self.draining:
            with pytest.raises(RemovingError):
                self.cache.register(key, value, size_bytes=size_bytes)
            assert picture(self.rig) == before
            return

        try:
            is_new = self.cache.register(key, value, size_bytes=size_bytes)
        except HostTierFullError:
            assert key not in self.values
            assert picture(self.rig) == before
            return

        assert is_new == (key not in self.values)
        self.forget_evicted()
        self.values.setdefault(key, value)
        assert self.cache.keys()[-1] == key

    @rule(key=KEYS, size_bytes=SIZES, is_stored=st.booleans())
    def reload(self, key: str, size_bytes: int, is_stored: bool) -> None:
        before = picture(self.rig)
        self.num_loads += 1
        value = f"{key} {self.num_loads}"
        loader: RecordingLoader[str, str] = RecordingLoader()
        if is_stored:
            loader.stored[key] = Loaded(value=value, size_bytes=size_bytes)

        try:
            self.cache.reload(key, loader)
        except (RemovingError, InUseError):
            assert key in self.leased()
            assert picture(self.rig) == before
            return
        except (LoadFailedError, HostTierFullError) as error:
            self.check_refusal(error, HostTierFullError if is_stored else LoadFailedError, before)
            return
        except PlacementError:
            assert key in self.pins
            self.pins.discard(key)

        self.forget_evicted()
        self.placing.pop(key, None)
        self.values[key] = value

    @rule(keys=SETS)
    def acquire(self, keys: list[str]) -> None:
        before = picture(self.rig)
        expected = self.expected_error(keys)
        assert self.cache.can_admit(keys) == (expected is None)
        absent = [key for key in dict.fromkeys(keys) if self.cache.slot_of(key) is None]

        try:
            lease = self.cache.acquire(keys)
        except CacheError as error:
            self.check_refusal(error, expected, before)
            return
        except PlacementError:
            self.give_up_placing(absent)
            assert self.cache.leased_keys().keys() == self.leased()
            self.forget_evicted()
            return

        assert expected is None
        self.check_victims(before, set(keys), absent)
        self.forget_evicted()
        for key in absent:
            self.placing.pop(key, None)
        assert lease.slots == {key: self.cache.slot_of(key) for key in set(keys)}
        assert (self.cache.layout_version == before.layout_version) == (not absent)
        self.leases.append(lease)
        self.lease_slots.append(dict(lease.slots))

    def give_up_placing(self, absent: list[str]) -> None:
        """One of the absent members failed; those before it are in their slots."""
        failed = next(key for key in absent if key in self.rig.placer.failing)
        for key in absent[: absent.index(failed) + 1]:
            self.placing.pop(key, None)
        self.forget_failed()

    @rule(keys=SETS)
    def begin(self, keys: list[str]) -> None:
        before = picture(self.rig)
        expected = self.expected_error(keys)

        try:
            lease, moves = self.cache.begin(keys)
        except CacheError as error:
            self.check_refusal(error, expected, before)
            return

        assert expected is None
        absent = [key for key in dict.fromkeys(keys) if key not in before.active]
        assert [move.key for move in moves] == [key for key in absent if key not in self.placing]
        self.check_victims(before, set(keys), absent)
        self.forget_evicted()
        self.placing |= {move.key: move.slot for move in moves}
        assert lease.is_ready == (not absent)
        assert lease.slots.keys() == set(keys)
        self.leases.append(lease)
        self.lease_slots.append(dict(lease.slots))

    @precondition(lambda self: self.placing)
    @rule(data=st.data(), succeeds=st.booleans())
    def end_a_write(self, data: st.DataObject, succeeds: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.placing)))
        slot = self.placing.pop(key)
        value = self.values.get(key) or self.draining[key]

        if succeeds:
            self.rig.placer.contents[slot] = (key, value)
            assert self.cache.finish(key, slot)
            assert self.cache.slot_of(key) == slot
        else:
            self.rig.placer.contents.pop(slot, None)
            assert self.cache.fail(key, slot, PlacementError("told to fail"))
            assert self.cache.slot_of(key) is None
            self.forget_failed()

    @rule(key=KEYS, slot=st.integers(min_value=0, max_value=3))
    def end_a_write_that_nobody_wants(self, key: str, slot: int) -> None:
        if self.placing.get(key) != slot:
            before = picture(self.rig)
            assert not self.cache.finish(key, slot)
            assert not self.cache.fail(key, slot, PlacementError("told to fail"))
            assert picture(self.rig) == before

    def check_victims(self, before: Picture, wanted: set[str], absent: list[str]) -> None:
        """Free slots went first, then the least recently used keys that nothing held."""
        held = wanted | self.pins | set(before.leased)
        may_go = [key for key in before.active if key not in held]
        num_free = before.slots.count(None) - len(before.placing)
        num_victims = max(0, sum(key not in before.placing for key in absent) - num_free)
        assert [key for key, _ in self.rig.hook.evicted] == may_go[:num_victims]

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), again=st.booleans())
    def release(self, data: st.DataObject, again: bool) -> None:
        position = data.draw(st.integers(min_value=0, max_value=len(self.leases) - 1))
        lease = self.leases.pop(position)
        self.lease_slots.pop(position)

        lease.release()
        if again:
            lease.release()

        self.forget_drained()

    @rule(key=KEYS)
    def activate(self, key: str) -> None:
        before = picture(self.rig)
        expected = self.expected_error([key])
        was_active = self.cache.slot_of(key) is not None

        try:
            is_new = self.cache.activate(key)
        except CacheError as error:
            self.check_refusal(error, expected, before)
            return
        except PlacementError:
            assert key in self.rig.placer.failing
            self.give_up_placing([key])
            self.forget_evicted()
            return

        assert expected is None
        assert is_new != was_active
        self.forget_evicted()
        self.placing.pop(key, None)

    @rule(keys=SETS)
    def touch(self, keys: list[str]) -> None:
        before = picture(self.rig)
        used = [key for key in keys if key in self.values]

        self.cache.touch(keys)

        others = [key for key in before.keys if key not in used]
        last_use = [key for i, key in enumerate(used) if key not in used[i + 1 :]]
        assert picture(self.rig) == before._replace(keys=(*others, *last_use))

    @rule(key=KEYS)
    def deactivate(self, key: str) -> None:
        was_active = self.cache.slot_of(key) is not None

        if key in self.leased() | self.pins:
            with pytest.raises(InUseError):
                self.cache.deactivate(key)
            return

        assert self.cache.deactivate(key) == was_active
        assert self.cache.slot_of(key) is None

    @rule(key=KEYS)
    def pin(self, key: str) -> None:
        before = picture(self.rig)
        expected = self.expected_error([key])
        if expected is None and key not in self.pins and len(self.pins) >= self.max_pins:
            expected = NoFreeSlotError
        if self.is_strict:
            expected = NoPinsError

        try:
            self.cache.pin(key)
        except CacheError as error:
            self.check_refusal(error, expected, before)
            return
        except PlacementError:
            assert key in self.rig.placer.failing
            self.give_up_placing([key])
            self.forget_evicted()
            return

        assert expected is None
        self.forget_evicted()
        self.placing.pop(key, None)
        self.pins.add(key)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.pins)))

        self.cache.unpin(key)

        self.pins.discard(key)

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        is_known = key in self.values

        assert self.cache.remove(key) == is_known

        if is_known:
            self.forget_removed([key])
        assert key not in self.cache

    @rule(key=KEYS)
    def restore(self, key: str) -> None:
        assert self.cache.restore(key) == (key in self.draining)

        if key in self.draining:
            self.values[key] = self.draining.pop(key)

    @rule(chance=st.integers(min_value=0, max_value=9))
    def clear_now_and_then(self, chance: int) -> None:
        if chance:
            return
        before = self.cache.layout_version

        self.cache.clear()

        assert self.cache.layout_version > before
        self.forget_removed(list(self.values))
        assert self.cache.keys() == ()

    def forget_removed(self, keys: list[str]) -> None:
        for key in keys:
            self.pins.discard(key)
            value = self.values.pop(key)
            if key in self.leased():
                self.draining[key] = value
            else:
                self.placing.pop(key, None)

    @rule(keys=st.sets(KEYS, max_size=2))
    def choose_failing(self, keys: set[str]) -> None:
        self.rig.placer.failing = keys

    # What must hold after every call.

    @invariant()
    def the_books_are_in_order_and_slots_hold_what_they_should(self) -> None:
        self.rig.check()

    @invariant()
    def the_cache_equals_the_model(self) -> None:
        assert {key: self.cache.get(key) for key in self.cache} == self.values
        assert set(self.cache.pinned_keys()) == self.pins
        assert self.cache.draining_keys() == set(self.draining)
        assert set(self.cache.leased_keys()) == self.leased()
        assert self.cache.stats().num_leases == len(self.leases)
        assert self.cache.placing_keys() == self.placing
        for key in "abcdefgh":
            assert (key in self.cache) == (key in self.values)

    @invariant()
    def what_is_leased_never_moves(self) -> None:
        for lease, slots in zip(self.leases, self.lease_slots, strict=True):
            assert {key: self.placing.get(key, self.cache.slot_of(key)) for key in slots} == slots
            assert lease.is_ready == self.placing.keys().isdisjoint(slots)

    def teardown(self) -> None:
        """All leases released, nothing is held or draining any more."""
        if not hasattr(self, "rig"):
            return
        for lease in self.leases:
            lease.release()
        assert self.cache.leased_keys() == {}
        assert self.cache.draining_keys() == frozenset()
        self.rig.check()


TestAdapterCache = AdapterCacheMachine.TestCase
TestAdapterCache.settings = settings(
    max_examples=250,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
