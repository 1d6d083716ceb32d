"""Which sequences compute how many tokens in the next step.

Running sequences come first; what is left of the token budget admits waiting ones. Among either,
the adapter that had fewest tokens goes first, and within it who waited longest for a turn, or came
first. A sequence that is short of KV blocks takes them from the latest arrival, which starts over
later (preemption by recomputation). A waiting request whose adapters do not fit is passed over,
never waited for; after `max_adapter_wait_s` the adapter that has held its slot longest makes room.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .fairness import TokenShares
from .kv_layout import int64_array
from .steady import SteadyPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lora_cache import Lease

    from .claims import SlotClaim
    from .kv import BlockPool
    from .sequence import SequenceState

_CREDIT_STEPS = 4
"""Full steps of tokens that an adapter may have in advance of the others."""


class AdapterUser(Protocol):
    """Who needs adapters in slots."""

    @property
    def adapter_digests(self) -> frozenset[str]:
        """Which adapters; empty for the base."""

    @property
    def lease(self) -> Lease[str] | None:
        """Their slots, once they are promised."""


class SlotUser(AdapterUser, Protocol):
    """Who waits for slots: a sequence, or a claim."""

    runnable_since_s: float | None
    """When its adapters were first in the host tier while it waited; None before."""


class AdapterGate(Protocol):
    """What the scheduler asks about adapters; `AdapterAdmission` answers."""

    def prefetch(self, users: Iterable[AdapterUser]) -> None:
        """Start fetching what these need, the first ones first."""

    def failure(self, user: AdapterUser) -> Exception | None:
        """Why it can never run, or None."""

    def forget_failures(self) -> None:
        """Let the next request for a failed adapter try again."""

    def is_runnable(self, user: AdapterUser) -> bool:
        """Whether all its adapters are in the host tier."""

    def can_admit(self, user: AdapterUser) -> bool:
        """Whether all its adapters fit in slots now, beside leased and pinned ones."""

    def begin(self, user: AdapterUser) -> Lease[str]:
        """Lease the slots of its adapters; they may still have to be written."""

    def is_pinned(self, digest: str) -> bool:
        """Whether the adapter must keep its slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of one step."""

    max_num_seqs: int
    """Sequences that hold KV blocks at once."""
    max_num_batched_tokens: int
    """Tokens of one step; also the longest prefill chunk."""
    block_size: int
    max_adapter_wait_s: float
    """Longest time a runnable request is passed over for want of a slot before one is drained."""


class ScheduledChunk(NamedTuple):
    """The next `num_tokens` tokens of a sequence."""

    sequence: SequenceState
    num_tokens: int


class Scheduler:
    """Waiting and running sequences. Owned by the engine thread."""

    def __init__(
        self,
        *,
        limits: SchedulerLimits,
        pool: BlockPool,
        adapters: AdapterGate | None,
        clock: Callable[[], float],
        on_slot_wait: Callable[[float], None] | None = None,
    ) -> None:
        """Start without sequences.

        Args:
            limits: of one step.
            pool: the KV blocks.
            adapters: who knows about slots; None where adapters are switched off.
            clock: seconds.
            on_slot_wait: told how long a sequence waited for slots, if it did, as it begins to run.
        """
        self.limits = limits
        self.pool = pool
        self._adapters = adapters
        self._clock = clock
        self._on_slot_wait = on_slot_wait
        self.waiting: list[SequenceState] = []
        """In order of arrival."""
        self.running: list[SequenceState] = []
        """In order of admission."""
        self.claims: list[SlotClaim] = []
        """In order of arrival."""
        self.num_preemptions = 0
        self.prefix_queries = 0
        """Prompt tokens that were looked up in the prefix cache."""
        self.prefix_hits = 0
        """Prompt tokens that were found there."""
        self._draining: str | None = None
        """The adapter whose slot an overdue request waits for; it admits nothing new."""
        self._shares = TokenShares(max_credit=_CREDIT_STEPS * limits.max_num_batched_tokens)
        self._num_steps = 0
        self._num_arrivals = 0
        self._steady: SteadyPlan | None = None
        """The last step's plan, while it may be the next one's too."""

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence is waiting or running, or a claim is open."""
        return bool(self.waiting or self.running or self.claims)

    @property
    def num_waiting_for_slot(self) -> int:
        """Waiting sequences that lack nothing but room, or the last copy, in adapter slots."""
        gate = self._adapters
        if gate is None:
            return 0
        return sum(
            gate.is_runnable(s) and (s.lease is not None or not gate.can_admit(s))
            for s in self.waiting
        )

    @property
    def num_waiting_for_load(self) -> int:
        """Waiting sequences whose adapters are being read."""
        gate = self._adapters
        return 0 if gate is None else sum(not gate.is_runnable(s) for s in self.waiting)

    def add(self, sequence: SequenceState) -> None:
        """Queue a new sequence."""
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.waiting.append(sequence)

    def finish(self, sequence: SequenceState) -> None:
        """Forget a sequence, waiting or running, and give back all it holds."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._end_steady()
        sequence.is_finished = True
        self._give_back(sequence)

    def take_failed(self) -> list[tuple[SequenceState, Exception]]:
        """Remove the waiting sequences whose adapters cannot be had, with the reason for each."""
        if self._adapters is None:
            return []
        failed = [
            (sequence, error)
            for sequence in self.waiting
            if (error := self._adapters.failure(sequence)) is not None
        ]
        for sequence, _ in failed:
            self.finish(sequence)
        for claim in list(self.claims):
            error = self._adapters.failure(claim)
            if error is not None:
                self.claims.remove(claim)
                claim.fail(error)
        self._adapters.forget_failures()
        return failed

    def fail_claims(self, error: Exception) -> None:
        """End every claim."""
        claims, self.claims = self.claims, []
        for claim in claims:
            claim.fail(error)

    def schedule(self) -> Sequence[ScheduledChunk]:
        """Choose the next step's tokens; empty when nothing can run now.

        The very same object as before says that the same sequences decode.
        """
        if self._steady is not None and not self.waiting and not self.claims:
            chunks = self._steady.again(self._shares, self.pool)
            if chunks is not None:
                self._num_steps += 1
                return chunks
        self._end_steady()
        self._num_steps += 1
        self._note_runnable()
        self._shares.settle({s.adapter_digests for s in (*self.running, *self.waiting)})
        overdue = self._make_room_for_overdue()
        self._serve_claims()
        first = [s for s in self.waiting if s is overdue or _is_promised(s)]
        preemptions_before = self.num_preemptions
        # Who has waited for a slot starts now, even where running ones could use every token.
        planned, budget = self._schedule_running(reserved=min(len(first), 1))
        if self.num_preemptions == preemptions_before:
            self._schedule_waiting(planned, budget, first)
        for sequence in planned:
            sequence.last_step = self._num_steps
        chunks = tuple(ScheduledChunk(sequence, count) for sequence, count in planned.items())
        if not self.waiting and len(chunks) == len(self.running):
            self._steady = SteadyPlan.of(chunks, self.limits.block_size)
        return chunks

    def _end_steady(self) -> None:
        """Forget the kept plan; its sequences had their last turn in the last step."""
        if self._steady is not None:
            for sequence, _ in self._steady.chunks:
                sequence.last_step = self._num_steps
            self._steady = None

    def _note_runnable(self) -> None:
        """Start the wait clocks of those whose adapters have arrived."""
        if self._adapters is None:
            return
        self._adapters.prefetch([*self.running, *self.claims, *self.waiting])
        now = self._clock()
        for user in self._waiting_users():
            if user.runnable_since_s is None and self._adapters.is_runnable(user):
                user.runnable_since_s = now

    def _make_room_for_overdue(self) -> SlotUser | None:
        """Drain a slot for whoever has been passed over longest, if that is over the limit.

        The victim admits nothing new from then on, and is preempted once each of its running
        sequences has generated a token since it was admitted: however short the limit, whoever
        gets a slot gets ahead.

        Returns:
            The overdue one when there is room for it now; it must be admitted first.
        """
        self._draining = None
        overdue = self._overdue()
        if overdue is None or self._adapters is None:
            return None
        while not self._adapters.can_admit(overdue):
            victim = self._longest_held(overdue.adapter_digests)
            if victim is None:
                return None
            users = [s for s in self.running if victim in s.adapter_digests]
            if any(s.num_generated <= s.num_generated_before for s in users):
                self._draining = victim
                return None
            for sequence in users:
                self._preempt(sequence)
        return overdue

    def _overdue(self) -> SlotUser | None:
        """The runnable one that has waited longest for slots, if over the limit."""
        gate = self._adapters
        if gate is None:
            return None
        limit = self._clock() - self.limits.max_adapter_wait_s
        late = [
            user
            for user in self._waiting_users()
            if user.adapter_digests and user.lease is None and _runnable_since(user) <= limit
        ]
        late.sort(key=_runnable_since)
        blocked = (u for u in late if gate.is_runnable(u) and not gate.can_admit(u))
        return next(blocked, None)

    def _waiting_users(self) -> list[SlotUser]:
        return [*self.claims, *self.waiting]

    def _longest_held(self, keep: frozenset[str]) -> str | None:
        """The unpinned adapter outside `keep` that a running sequence has held longest."""
        assert self._adapters is not None
        since: dict[str, float] = {}
        for sequence in self.running:
            for digest in sequence.adapter_digests - keep:
                if not self._adapters.is_pinned(digest):
                    since[digest] = min(since.get(digest, sequence.admitted_s), sequence.admitted_s)
        return min(since, key=since.__getitem__, default=None)

    def _serve_claims(self) -> None:
        """Give the claims the slots there are, and let those that have theirs do their work."""
        gate = self._adapters
        if gate is None:
            return
        for claim in self.claims:
            if claim.lease is None and gate.is_runnable(claim) and gate.can_admit(claim):
                claim.lease = gate.begin(claim)
        ready = [claim for claim in self.claims if claim.is_ready]
        self.claims = [claim for claim in self.claims if not claim.is_ready]
        for claim in ready:
            claim.settle()

    def _schedule_running(self, *, reserved: int) -> tuple[dict[SequenceState, int], int]:
        """Give running sequences their turn; what each computes, and the budget that is left."""
        if (planned := self._decode_all(reserved=reserved)) is not None:
            return planned, self.limits.max_num_batched_tokens - len(planned)
        limit = budget = self.limits.max_num_batched_tokens - reserved
        planned = {}
        level = self._shares.level
        turns = sorted(self.running, key=lambda s: (level(s.adapter_digests), s.last_step))
        num_decoding = sum(s.num_pending == 1 for s in turns)
        preemptions_before = self.num_preemptions
        for sequence in turns:
            if budget == 0:
                break
            if self.num_preemptions > preemptions_before and sequence not in self.running:
                continue  # lost its blocks to an earlier turn
            count = 1
            if sequence.num_pending > 1:
                # A prefill leaves room for the decoding sequences still to come.
                count = min(sequence.num_pending, max(1, budget - num_decoding))
            else:
                num_decoding -= 1
            if self._grow(sequence, count, planned):
                planned[sequence] = count
                budget = limit - sum(planned.values())
        for sequence, count in planned.items():
            self._shares.charge(sequence.adapter_digests, count)
        return planned, budget + reserved

    def _decode_all(self, *, reserved: int) -> dict[SequenceState, int] | None:
        """Plan a token for every running sequence, if that is all there is to do and it fits.

        Most steps are such steps. Nobody's turn comes at another's expense in them, so that the
        order of turns does not matter.
        """
        running = self.running
        if len(running) > self.limits.max_num_batched_tokens - reserved:
            return None
        block_size = self.limits.block_size
        growing = []
        for sequence in running:
            num_computed = sequence.num_computed
            if len(sequence.token_ids) - num_computed != 1:
                return None
            if num_computed >= len(sequence.block_ids) * block_size:
                growing.append(sequence)
        if not self.pool.can_allocate(len(growing)):
            return None
        for sequence in growing:
            sequence.block_ids.extend(self.pool.allocate(1))
        for digests, count in Counter(s.adapter_digests for s in running).items():
            self._shares.charge(digests, count)
        return dict.fromkeys(running, 1)

    def _grow(self, sequence: SequenceState, count: int, planned: dict[SequenceState, int]) -> bool:
        """Get blocks for `count` more tokens, from the latest arrivals when none are left."""
        needed = self._blocks_for(sequence.num_computed + count) - len(sequence.block_ids)
        while not self.pool.can_allocate(needed):
            victim = max(self.running, key=lambda s: s.arrival)
            planned.pop(victim, None)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_ids.extend(self.pool.allocate(needed))
        return True

    def _schedule_waiting(
        self,
        planned: dict[SequenceState, int],
        budget: int,
        first: list[SequenceState],
    ) -> None:
        """Admit waiting sequences while tokens, sequences and blocks are left."""
        ahead = set(first)
        rest = [sequence for sequence in self.waiting if sequence not in ahead]
        num_promised = sum(_is_promised(s) for s in first)
        for sequence in (*first, *self._shares.in_turn(rest)):
            num_seats = self.limits.max_num_seqs - len(self.running)
            if budget == 0 or num_seats == 0:
                return
            was_promised = _is_promised(sequence)
            if not was_promised and num_seats <= num_promised:
                continue
            if not self._may_start(sequence):
                num_promised += not was_promised and _is_promised(sequence)
                continue
            if not self._admit(sequence):
                return  # short of blocks: later arrivals must not overtake for ever
            num_promised -= was_promised
            count = min(sequence.num_pending, budget)
            planned[sequence] = count
            self._shares.charge(sequence.adapter_digests, count)
            budget -= count

    def _may_start(self, sequence: SequenceState) -> bool:
        """Whether nothing but tokens and blocks stands in the way; takes the slots it needs."""
        leader = sequence.leader
        if leader is not None and leader.is_prefilling and not leader.is_finished:
            return False
        if self._adapters is None or not sequence.adapter_digests:
            return True
        return self._has_slots(sequence, self._adapters)

    def _has_slots(self, sequence: SequenceState, gate: AdapterGate) -> bool:
        """Whether its adapters are in their slots; takes the slots if there is room for them."""
        if sequence.lease is None:
            if self._draining in sequence.adapter_digests or not gate.is_runnable(sequence):
                return False
            if gate.can_admit(sequence):
                sequence.lease = gate.begin(sequence)
        if sequence.lease is not None and sequence.lease.is_ready:
            return True
        self._note_slot_wait(sequence)
        return False

    def _note_slot_wait(self, sequence: SequenceState) -> None:
        if sequence.blocked_since_s is None:
            sequence.blocked_since_s = self._clock()

    def _tell_slot_wait(self, sequence: SequenceState) -> None:
        if sequence.blocked_since_s is not None and self._on_slot_wait is not None:
            self._on_slot_wait(self._clock() - sequence.blocked_since_s)
        sequence.blocked_since_s = None

    def _admit(self, sequence: SequenceState) -> bool:
        """Move a sequence that has its slots to the running ones, with blocks for all its tokens.

        Without the blocks it gives its slots back.
        """
        shared = self._find_prefix(sequence)
        needed = self._blocks_for(sequence.num_tokens) - len(shared)
        if needed > self.pool.num_available - self.pool.num_kept(shared):
            self._give_back(sequence)
            return False
        self.pool.share(shared)
        sequence.block_ids = int64_array([*shared, *self.pool.allocate(needed)])
        sequence.num_computed = len(shared) * self.limits.block_size
        if sequence.num_generated == 0:
            sequence.num_cached_tokens = sequence.num_computed
            self.prefix_queries += sequence.num_prompt_tokens
            self.prefix_hits += sequence.num_computed
        self._tell_slot_wait(sequence)
        sequence.admitted_s = self._clock()
        sequence.num_generated_before = sequence.num_generated
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def _find_prefix(self, sequence: SequenceState) -> list[int]:
        """Blocks that already hold the sequence's first tokens; at least one token is left over."""
        if not self.pool.keeps_prefixes or sequence.needs_prompt_rows:
            return []
        keys = sequence.keys_of_full_blocks(sequence.num_tokens - 1, self.limits.block_size)
        return self.pool.find(keys)

    def _preempt(self, sequence: SequenceState) -> None:
        """Send a running sequence back to wait; its tokens are kept, its KV is computed again."""
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.num_computed = 0
        sequence.runnable_since_s = None
        insort(self.waiting, sequence, key=lambda s: s.arrival)
        self.num_preemptions += 1

    def _give_back(self, sequence: SequenceState) -> None:
        self.pool.release(sequence.block_ids)
        sequence.block_ids = int64_array()
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)


def _is_promised(sequence: SequenceState) -> bool:
    """Whether a waiting sequence holds slots already, written or not."""
    return sequence.lease is not None


def _runnable_since(user: SlotUser) -> float:
    """When a wait began that only room in the slots can end; never, if it has not."""
    return math.inf if user.runnable_since_s is None else user.runnable_since_s
