"""Who goes into the next step: in turn, within bounds, and never waiting for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_cache import Lease
from lora_server.engine.claims import SlotClaim
from lora_server.engine.pooling_request import PoolingKind, PoolingRequest
from lora_server.engine.pooling_scheduler import PoolingLimits, PoolingScheduler
from lora_server.engine.pooling_sequence import PoolingSequence
from lora_server.engine.request import AdapterUse
from lora_server.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lora_server.engine.scheduler import AdapterUser


class Gate:
    """Slots that are written when `write` is called; everything is in host memory unless absent."""

    def __init__(self, num_slots: int, *, writes_at_once: bool = True) -> None:
        self.num_slots = num_slots
        self.writes_at_once = writes_at_once
        self.resident: dict[str, int] = {}
        """Adapter -> leases that hold it."""
        self.pinned: set[str] = set()
        self.absent: set[str] = set()
        self.failing: set[str] = set()
        self.placing: list[tuple[Lease[str], str]] = []
        self.asked: list[frozenset[str]] = []

    def prefetch(self, users: Iterable[AdapterUser]) -> None:
        self.asked = [user.adapter_digests for user in users]

    def failure(self, user: AdapterUser) -> Exception | None:
        return EngineError("gone") if user.adapter_digests & self.failing else None

    def forget_failures(self) -> None:
        self.failing.clear()

    def is_runnable(self, user: AdapterUser) -> bool:
        return not user.adapter_digests & self.absent

    def can_admit(self, user: AdapterUser) -> bool:
        kept = {d for d, leases in self.resident.items() if leases or d in self.pinned}
        return len(kept | user.adapter_digests) <= self.num_slots

    def begin(self, user: AdapterUser) -> Lease[str]:
        assert self.can_admit(user)
        new = [d for d in user.adapter_digests if d not in self.resident]
        for digest in new:
            free = [d for d, n in self.resident.items() if not n and d not in self.pinned]
            free = [d for d in free if d not in user.adapter_digests]
            if len(self.resident) == self.num_slots:
                del self.resident[free[0]]
            self.resident[digest] = 0
        for digest in user.adapter_digests:
            self.resident[digest] += 1
        lease = Lease(dict.fromkeys(user.adapter_digests, 0), self._release, placing=new)
        self.placing += [(lease, digest) for digest in new]
        if self.writes_at_once:
            self.write()
        return lease

    def write(self) -> None:
        for lease, digest in self.placing:
            lease.note_placed(digest)
        self.placing.clear()

    def is_pinned(self, digest: str) -> bool:
        return digest in self.pinned

    def _release(self, slots: Mapping[str, int]) -> None:
        for digest in slots:
            self.resident[digest] -= 1


def text(arrival: int, *adapters: str, tokens: int = 4) -> PoolingSequence:
    """Return a text that waits."""
    request = PoolingRequest(
        request_id=str(arrival),
        token_ids=(1,) * tokens,
        type_ids=(0,) * tokens,
        kind=PoolingKind.EMBED,
        adapters=tuple(AdapterUse(digest=name) for name in adapters),
    )
    return PoolingSequence(request, arrival)


def scheduler(gate: Gate | None, *, tokens: int = 100, seqs: int = 8) -> PoolingScheduler:
    """Return a scheduler with these bounds."""
    limits = PoolingLimits(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    return PoolingScheduler(limits=limits, adapters=gate)


def run(schedule: PoolingScheduler) -> list[str]:
    """Run a step and return who was in it."""
    chosen = schedule.schedule()
    for sequence in chosen:
        schedule.finish(sequence)
    return [sequence.request.request_id for sequence in chosen]


def test_a_step_holds_no_more_than_its_tokens_and_texts() -> None:
    few_tokens, few_texts = scheduler(None, tokens=10), scheduler(None, seqs=2)
    for i in range(5):
        few_tokens.add(text(i, tokens=4))
        few_texts.add(text(i))

    assert run(few_tokens) == ["0", "1"]
    assert run(few_texts) == ["0", "1"]


def test_a_text_longer_than_a_step_goes_alone() -> None:
    schedule = scheduler(None, tokens=10)
    schedule.add(text(0, tokens=50))
    schedule.add(text(1, tokens=2))

    assert run(schedule) == ["0"]
    assert run(schedule) == ["1"]


def test_a_wait_for_a_slot_is_told_as_it_ends_and_other_waits_are_not() -> None:
    now_s = 0.0
    waits: list[float] = []
    schedule = PoolingScheduler(
        limits=PoolingLimits(max_num_seqs=8, max_num_batched_tokens=100),
        adapters=Gate(1),
        clock=lambda: now_s,
        on_slot_wait=waits.append,
    )
    for i, adapters in enumerate([("a",), ("b",), ("c",), ()]):
        schedule.add(text(i, *adapters))

    order = []
    for _ in range(3):
        order.append(run(schedule))
        now_s += 2.0

    assert order == [["0", "3"], ["1"], ["2"]]
    assert waits == [2.0, 4.0]


def test_adapters_take_turns_whatever_one_of_them_has_queued() -> None:
    schedule = scheduler(Gate(2), tokens=4)
    for i in range(6):
        schedule.add(text(i, "busy"))
    schedule.add(text(6, "rare"))

    order = [name for _ in range(3) for name in run(schedule)]

    assert "6" in order


def test_a_text_whose_adapter_is_being_read_or_written_is_passed_over() -> None:
    gate = Gate(2, writes_at_once=False)
    gate.absent = {"a"}
    schedule = scheduler(gate)
    for i, name in enumerate(("a", "b")):
        schedule.add(text(i, name))
    schedule.add(text(2))

    assert run(schedule) == ["2"]
    assert gate.asked == [frozenset("a"), frozenset("b"), frozenset()]
    assert schedule.num_waiting_for_load == 1
    gate.absent.clear()
    gate.write()
    assert run(schedule) == ["1"]
    gate.write()
    assert run(schedule) == ["0"]
    assert not schedule.has_unfinished
    assert set(gate.resident.values()) == {0}


def test_nobody_takes_a_slot_that_a_wide_set_before_it_waits_for() -> None:
    gate = Gate(2, writes_at_once=False)
    schedule = scheduler(gate)
    schedule.add(text(0, "a"))
    schedule.schedule()  # a is being written
    schedule.add(text(1, "b", "c"))
    schedule.add(text(2, "d"))

    assert run(schedule) == []
    assert set(gate.resident) == {"a"}
    assert schedule.num_waiting_for_slot == 2
    gate.write()
    assert run(schedule) == ["0"]
    assert run(schedule) == []
    assert {"b", "c"} <= set(gate.resident)
    gate.write()
    assert run(schedule) == ["1"]


def test_failed_adapters_end_their_texts_and_claims_alone() -> None:
    gate = Gate(2)
    schedule = scheduler(gate)
    for i, name in enumerate(("a", "b")):
        schedule.add(text(i, name))
    claim = SlotClaim("a", lambda: None)
    schedule.claims.append(claim)
    gate.failing = {"a"}

    failed = schedule.take_failed()

    assert [sequence.request.request_id for sequence, _ in failed] == ["0"]
    with pytest.raises(EngineError, match="gone"):
        claim.outcome.result(timeout=1)
    assert run(schedule) == ["1"]


def test_a_claim_gets_its_slot_before_texts_do_and_lets_go_of_it() -> None:
    gate = Gate(1)
    schedule = scheduler(gate)
    done: list[str] = []
    schedule.claims.append(SlotClaim("a", lambda: done.append("a")))
    schedule.add(text(0, "b"))

    assert run(schedule) == ["0"]
    assert done == ["a"]
    assert not schedule.has_unfinished


def test_claims_end_when_the_engine_gives_up() -> None:
    schedule = scheduler(Gate(1))
    claim = SlotClaim("a", lambda: None)
    schedule.claims.append(claim)

    schedule.fail_claims(EngineError("over"))

    with pytest.raises(EngineError, match="over"):
        claim.outcome.result(timeout=1)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    plan=st.lists(
        st.tuples(
            st.frozensets(st.sampled_from("abcdef"), max_size=3),
            st.integers(min_value=1, max_value=30),
        ),
        min_size=1,
        max_size=25,
    ),
    num_slots=st.integers(min_value=3, max_value=6),
    writes_at_once=st.booleans(),
)
def test_every_text_runs_within_a_bound_and_every_slot_comes_free(
    plan: list[tuple[frozenset[str], int]], num_slots: int, writes_at_once: bool
) -> None:
    gate = Gate(num_slots, writes_at_once=writes_at_once)
    schedule = scheduler(gate, tokens=32, seqs=4)
    for arrival, (adapters, tokens) in enumerate(plan):
        schedule.add(text(arrival, *adapters, tokens=tokens))

    num_steps = 0
    while schedule.has_unfinished:
        num_steps += 1
        assert num_steps <= 4 * len(plan)
        run(schedule)
        assert sum(n > 0 for n in gate.resident.values()) <= num_slots
        gate.write()

    assert all(n == 0 for n in gate.resident.values())
