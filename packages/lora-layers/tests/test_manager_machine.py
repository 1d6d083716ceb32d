"""Random calls on a manager over a real decoder: every leased adapter answers as merged weights.

After each call every adapter that a ready lease holds runs in one mixed step with the base, and
each row is compared with float64 arithmetic on the weights it stands for. Failures are real ones:
adapters that do not fit the model, and adapters whose last module refuses its tensors when the
others are written already.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lora_cache import (
    CacheError,
    HostTierFullError,
    Lease,
    NoFreeSlotError,
    RemovingError,
    SetTooLargeError,
    UnknownKeyError,
)
from lora_cache.testing import ManualClock, check_consistency
from lora_kernels import UnsupportedShapeError
from lora_layers import AdapterMismatchError, LoraModelConfig, LoraModelManager
from lora_layers.content import PreparedAdapter, SlotContent
from lora_layers.testing import (
    LINEARS,
    PACKED_MODULES,
    BuiltAdapter,
    TinyDecoder,
    build_adapter,
    dense_logits,
    runs,
)

NAMES = "abcde"
VERSIONS = 2
TOKEN = torch.tensor([5])
MAX_RANK = 6
PATHS = (*LINEARS, "embed_tokens")

KEYS = st.sampled_from([f"{name}{version}" for name in NAMES for version in range(VERSIONS)])
SETS = st.lists(KEYS, min_size=1, max_size=3)


@cache
def built(key: str) -> BuiltAdapter:
    """Return the adapter of a key: of one version of one name, each with its own modules."""
    number = NAMES.index(key[0]) * VERSIONS + int(key[1])
    with tempfile.TemporaryDirectory() as folder:
        return build_adapter(
            Path(folder) / key, PATHS[number % 3 :: 2], r=1 + number % MAX_RANK, seed=number
        )


@cache
def too_wide() -> BuiltAdapter:
    """Return an adapter of a higher rank than the slots have."""
    with tempfile.TemporaryDirectory() as folder:
        return build_adapter(Path(folder) / "wide", r=MAX_RANK + 1)


@cache
def expected(key: str | None) -> torch.Tensor:
    """Return the logits of `TOKEN` from merged weights."""
    state = TinyDecoder().state_dict()
    return dense_logits(state, TOKEN, *([] if key is None else [(built(key), 1.0)]))


def spoiled(prepared: PreparedAdapter) -> PreparedAdapter:
    """Return an adapter whose last module refuses its tensors."""
    bad = SlotContent(slices=((torch.ones(1, 16), torch.ones(31, 1)),))
    return replace(prepared, contents={**prepared.contents, "lm_head": bad})


@dataclass
class Held:
    """An open lease and what it was asked for."""

    lease: Lease[str]
    keys: frozenset[str]


class ManagerMachine(RuleBasedStateMachine):
    """The model: which keys are known, which of them are spoiled, pins, leases."""

    @initialize(
        num_slots=st.integers(min_value=1, max_value=3),
        spare_host=st.integers(min_value=0, max_value=3),
        is_paced=st.booleans(),
    )
    def start(self, num_slots: int, spare_host: int, is_paced: bool) -> None:
        self.clock = ManualClock()
        self.model = TinyDecoder()
        config = LoraModelConfig(
            max_loras=num_slots,
            max_cpu_loras=num_slots + spare_host,
            max_lora_rank=MAX_RANK,
            packed_modules=PACKED_MODULES,
        )
        self.evicted: list[str] = []
        self.manager = LoraModelManager(
            self.model,
            config,
            on_evict=lambda key, tier: self.evicted.append(key) if tier == "host" else None,
            is_paced=is_paced,
            clock=self.tick,
        )
        self.known: set[str] = set()
        self.spoiled: set[str] = set()
        self.draining: set[str] = set()
        self.pins: set[str] = set()
        self.held: list[Held] = []

    def tick(self) -> float:
        """Each look at the clock takes a second, so that a few modules take a few."""
        self.clock.advance(1.0)
        return self.clock.now_s

    def leased(self) -> set[str]:
        return {key for held in self.held for key in held.keys}

    def settle(self) -> None:
        """Take out of the model what was evicted, ended in failure, or has drained."""
        for key in self.evicted:
            assert key not in self.leased() | self.pins
            self.known.discard(key)
        self.evicted.clear()
        for held in [held for held in self.held if held.lease.failure is not None]:
            assert held.keys & self.spoiled
            assert isinstance(held.lease.failure, UnsupportedShapeError)
            self.held.remove(held)
        self.draining &= self.leased()
        self.spoiled &= self.known | self.draining

    @rule(key=KEYS, is_spoiled=st.integers(min_value=0, max_value=4).map(lambda n: n == 0))
    def register(self, key: str, is_spoiled: bool) -> None:
        prepared = self.manager.prepare(built(key).adapter)
        try:
            is_new = self.manager.register(key, spoiled(prepared) if is_spoiled else prepared)
        except RemovingError:
            assert key in self.draining
            return
        except HostTierFullError:
            assert key not in self.known
            return
        assert is_new == (key not in self.known)
        self.settle()
        if is_new:
            self.known.add(key)
            self.spoiled -= {key}
            self.spoiled |= {key} if is_spoiled else set()

    @rule()
    def prepare_what_does_not_fit(self) -> None:
        before = self.manager.stats()
        with pytest.raises(AdapterMismatchError):
            self.manager.prepare(too_wide().adapter)
        assert self.manager.stats() == before

    def may_raise(self, keys: set[str]) -> tuple[type[Exception], ...]:
        """Say what bringing the set in may raise."""
        if not keys <= self.known:
            return (UnknownKeyError,)
        if len(keys) > self.manager.config.max_loras:
            return (SetTooLargeError,)
        if not self.manager.can_admit(keys):
            return (NoFreeSlotError,)
        return (UnsupportedShapeError,) if keys & self.spoiled else ()

    def check_refusal(self, error: Exception, allowed: tuple[type[Exception], ...]) -> None:
        assert type(error) in allowed
        self.settle()

    @rule(keys=SETS, waits=st.booleans())
    def acquire_or_begin(self, keys: list[str], waits: bool) -> None:
        wanted = set(keys)
        allowed = self.may_raise(wanted)
        before = self.manager.stats().num_leases
        try:
            lease = self.manager.begin(keys) if waits else self.manager.acquire(keys)
        except (CacheError, UnsupportedShapeError) as error:
            self.check_refusal(error, allowed)
            assert self.manager.stats().num_leases <= before
            return
        if not waits:
            assert lease.is_ready
            assert UnsupportedShapeError not in allowed
        self.held.append(Held(lease, frozenset(wanted)))
        self.settle()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        position = data.draw(st.integers(min_value=0, max_value=len(self.held) - 1))
        self.held.pop(position).lease.release()
        self.settle()

    @rule(seconds=st.integers(min_value=1, max_value=8))
    def go_on_writing(self, seconds: int) -> None:
        self.manager.advance(float(seconds))
        self.settle()

    @rule(key=KEYS)
    def pin(self, key: str) -> None:
        allowed = self.may_raise({key})
        if len(self.pins | {key}) >= self.manager.config.max_loras:
            allowed = (*allowed, NoFreeSlotError)
        try:
            self.manager.pin(key)
        except (CacheError, UnsupportedShapeError) as error:
            self.check_refusal(error, allowed)
            return
        self.pins.add(key)
        self.settle()

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.pins)))
        self.manager.unpin(key)
        self.pins.discard(key)

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        assert self.manager.remove(key) == (key in self.known)
        if key in self.known:
            self.known.discard(key)
            self.pins.discard(key)
            if key in self.leased():
                self.draining.add(key)
        self.settle()

    @rule(name=st.sampled_from(NAMES), version=st.integers(min_value=0, max_value=VERSIONS - 1))
    def update(self, name: str, version: int) -> None:
        """Replace whatever version of a name is there by one, as an in-place update does."""
        new = f"{name}{version}"
        for old in [key for key in self.known if key[0] == name and key != new]:
            self.remove(old)
        if new in self.draining:
            assert self.manager.restore(new)
            self.draining.discard(new)
            self.known.add(new)
        else:
            self.register(new, is_spoiled=False)

    @invariant()
    def every_leased_adapter_answers_as_its_merged_weights(self) -> None:
        ready = [key for held in self.held if held.lease.is_ready for key in sorted(held.keys)]
        keys = [None, *dict.fromkeys(ready)]
        rows = runs(*((1, key) for key in keys))
        self.manager.set_routing(rows, rows)
        with torch.no_grad():
            logits = self.model(TOKEN.expand(len(keys)))
        wanted = torch.cat([expected(key) for key in keys])
        torch.testing.assert_close(logits.double(), wanted, atol=5e-4, rtol=5e-4)

    @invariant()
    def the_books_are_in_order(self) -> None:
        cache = self.manager._cache
        check_consistency(cache)
        assert set(cache.keys()) == self.known
        assert set(cache.pinned_keys()) == self.pins
        assert set(cache.leased_keys()) == self.leased()
        assert cache.draining_keys() == self.draining
        assert cache.stats().num_leases == len(self.held)
        sizes = {key: cache._host.get(key).nbytes for key in cache._host}
        assert cache.stats().host_bytes == sum(sizes.values())
        assert cache.stats().device_bytes == sum(sizes[key] for key in cache.active_keys())

    def teardown(self) -> None:
        """Every wait ends: without limit all writes are done, and nothing is held afterwards."""
        if not hasattr(self, "manager"):
            return
        self.manager.advance()
        self.settle()
        assert all(held.lease.is_ready for held in self.held)
        self.every_leased_adapter_answers_as_its_merged_weights()
        for held in self.held:
            held.lease.release()
        self.held.clear()
        self.settle()
        assert self.manager.stats().num_leases == 0
        self.manager.clear()
        self.manager.advance()
        stats = self.manager.stats()
        assert (stats.host_bytes, stats.slots_used, stats.slots_placing) == (0, 0, 0)


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
