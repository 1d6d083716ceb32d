"""Which sequences compute how many tokens in the next step.

Running sequences come first, those that waited longest for a turn before the others; what is left
of the token budget admits waiting ones in order of arrival. A sequence that is short of KV blocks
takes them from the latest arrival, which starts over later (preemption by recomputation). A waiting
request whose adapters do not fit is passed over, never waited for; after `max_adapter_wait_s` the
adapter that has held its slot longest makes room.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lora_cache import Lease

    from .kv import BlockPool
    from .sequence import SequenceState


class AdapterGate(Protocol):
    """What the scheduler asks about adapters; `AdapterAdmission` answers."""

    def prefetch(self, sequences: Iterable[SequenceState]) -> None:
        """Start fetching what these sequences need, the first ones first."""

    def failure(self, sequence: SequenceState) -> Exception | None:
        """Why the sequence can never run, or None."""

    def forget_failures(self) -> None:
        """Let the next request for a failed adapter try again."""

    def is_runnable(self, sequence: SequenceState) -> bool:
        """Whether all its adapters are in the host tier."""

    def can_admit(self, sequence: SequenceState) -> bool:
        """Whether all its adapters fit in slots now, beside leased and pinned ones."""

    def acquire(self, sequence: SequenceState) -> Lease[str] | None:
        """Lease the slots of its adapters; None for a base request."""

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


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
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
    ) -> None:
        self.limits = limits
        self.pool = pool
        self._adapters = adapters
        self._clock = clock
        self.waiting: list[SequenceState] = []
        """In order of arrival."""
        self.running: list[SequenceState] = []
        """In order of admission."""
        self.num_preemptions = 0
        self.prefix_queries = 0
        """Prompt tokens that were looked up in the prefix cache."""
        self.prefix_hits = 0
        """Prompt tokens that were found there."""
        self._draining: str | None = None
        """The adapter whose slot an overdue request waits for; it admits nothing new."""
        self._num_steps = 0
        self._num_arrivals = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.waiting or self.running)

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
        self._adapters.forget_failures()
        return failed

    def schedule(self) -> list[ScheduledChunk]:
        """Choose the next step's tokens; empty when nothing can run now."""
        self._num_steps += 1
        self._note_runnable()
        overdue = self._make_room_for_overdue()
        preemptions_before = self.num_preemptions
        # An overdue request starts now, even where running ones could use every token.
        planned, budget = self._schedule_running(reserved=int(overdue is not None))
        if self.num_preemptions == preemptions_before:
            self._schedule_waiting(planned, budget, overdue)
        for sequence in planned:
            sequence.last_step = self._num_steps
        return [ScheduledChunk(sequence, count) for sequence, count in planned.items()]

    def _note_runnable(self) -> None:
        """Start the wait clocks of the requests whose adapters have arrived."""
        if self._adapters is None:
            return
        self._adapters.prefetch([*self.running, *self.waiting])
        now = self._clock()
        for sequence in self.waiting:
            if sequence.runnable_since_s is None and self._adapters.is_runnable(sequence):
                sequence.runnable_since_s = now

    def _make_room_for_overdue(self) -> SequenceState | None:
        """Drain a slot for the request that has been passed over longest, if it is over the limit.

        The victim admits nothing new from then on, and is preempted once each of its running
        sequences has generated a token since it was admitted: however short the limit, whoever
        gets a slot gets ahead.

        Returns:
            The overdue request when there is room for it now; it must be admitted first.
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

    def _overdue(self) -> SequenceState | None:
        """The runnable request that has waited longest for slots, if over the limit."""
        if self._adapters is None:
            return None
        limit = self._clock() - self.limits.max_adapter_wait_s
        found: SequenceState | None = None
        for s in self.waiting:
            since = s.runnable_since_s
            if since is None or since > limit or not s.adapter_digests:
                continue
            if not self._adapters.is_runnable(s) or self._adapters.can_admit(s):
                continue
            if found is None or found.runnable_since_s is None or since < found.runnable_since_s:
                found = s
        return found

    def _longest_held(self, keep: frozenset[str]) -> str | None:
        """The unpinned adapter outside `keep` that a running sequence has held longest."""
        assert self._adapters is not None
        since: dict[str, float] = {}
        for sequence in self.running:
            for digest in sequence.adapter_digests - keep:
                if not self._adapters.is_pinned(digest):
                    since[digest] = min(since.get(digest, sequence.admitted_s), sequence.admitted_s)
        return min(since, key=since.__getitem__, default=None)

    def _schedule_running(self, *, reserved: int) -> tuple[dict[SequenceState, int], int]:
        """Give running sequences their turn; what each computes, and the budget that is left."""
        limit = budget = self.limits.max_num_batched_tokens - reserved
        planned: dict[SequenceState, int] = {}
        turns = sorted(self.running, key=lambda s: s.last_step)
        num_decoding = sum(s.num_pending == 1 for s in turns)
        for sequence in turns:
            if budget == 0:
                break
            if sequence not in self.running:
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
        return planned, budget + reserved

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
        overdue: SequenceState | None,
    ) -> None:
        """Admit waiting sequences while tokens, sequences and blocks are left."""
        order = list(self.waiting)
        if overdue is not None:
            order.remove(overdue)
            order.insert(0, overdue)
        for sequence in order:
            if budget == 0 or len(self.running) >= self.limits.max_num_seqs:
                return
            if not self._may_start(sequence):
                continue
            if not self._admit(sequence):
                return  # short of blocks: later arrivals must not overtake for ever
            count = min(sequence.num_pending, budget)
            planned[sequence] = count
            budget -= count

    def _may_start(self, sequence: SequenceState) -> bool:
        """Whether nothing but tokens and blocks stands in the way."""
        leader = sequence.leader
        if leader is not None and leader.is_prefilling and not leader.is_finished:
            return False
        if self._adapters is None:
            return True
        if self._draining in sequence.adapter_digests:
            return False
        return self._adapters.is_runnable(sequence) and self._adapters.can_admit(sequence)

    def _admit(self, sequence: SequenceState) -> bool:
        """Move a sequence to the running ones with its lease and the blocks of all its tokens."""
        shared = self._find_prefix(sequence)
        needed = self._blocks_for(sequence.num_tokens) - len(shared)
        if needed > self.pool.num_available - self.pool.num_kept(shared):
            return False
        if self._adapters is not None:
            sequence.lease = self._adapters.acquire(sequence)
        self.pool.share(shared)
        sequence.block_ids = [*shared, *self.pool.allocate(needed)]
        sequence.num_computed = len(shared) * self.limits.block_size
        if sequence.num_generated == 0:
            sequence.num_cached_tokens = sequence.num_computed
            self.prefix_queries += sequence.num_prompt_tokens
            self.prefix_hits += sequence.num_computed
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
        sequence.block_ids = []
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)
