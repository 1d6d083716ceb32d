"""Which texts go through the model in the next step.

A text is computed whole and once, so that nothing is held from one step to the next but the slots
of adapters that are still being written. The adapter that had fewest tokens goes first, and within
it who came first. A text whose adapters do not fit is passed over; from then on nobody behind it
takes a further slot, so that it finds room as soon as the slots that are being written are used.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .fairness import TokenShares

if TYPE_CHECKING:
    from collections.abc import Callable

    from .claims import SlotClaim
    from .pooling_sequence import PoolingSequence
    from .scheduler import AdapterGate

_CREDIT_STEPS = 4
"""Full steps of tokens that an adapter may have in advance of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingLimits:
    """Bounds of one step."""

    max_num_seqs: int
    """Texts."""
    max_num_batched_tokens: int
    """Tokens; a single text may be longer, since it cannot be cut."""


class PoolingScheduler:
    """The texts that wait. Owned by the engine thread."""

    def __init__(
        self,
        *,
        limits: PoolingLimits,
        adapters: AdapterGate | None,
        clock: Callable[[], float] = time.monotonic,
        on_slot_wait: Callable[[float], None] | None = None,
    ) -> None:
        """Start without texts.

        Args:
            limits: of one step.
            adapters: who knows about slots; None where adapters are switched off.
            clock: seconds.
            on_slot_wait: told how long a text waited for slots, if it did, as it is chosen.
        """
        self.limits = limits
        self._clock = clock
        self._on_slot_wait = on_slot_wait
        self._adapters = adapters
        self.waiting: list[PoolingSequence] = []
        """In order of arrival."""
        self.claims: list[SlotClaim] = []
        """In order of arrival."""
        self._shares = TokenShares(max_credit=_CREDIT_STEPS * limits.max_num_batched_tokens)

    @property
    def has_unfinished(self) -> bool:
        """Whether any text waits, or a claim is open."""
        return bool(self.waiting or self.claims)

    @property
    def num_waiting_for_load(self) -> int:
        """Texts whose adapters are being read."""
        gate = self._adapters
        return 0 if gate is None else sum(not gate.is_runnable(s) for s in self.waiting)

    @property
    def num_waiting_for_slot(self) -> int:
        """Texts that lack nothing but room, or the last copy, in adapter slots."""
        gate = self._adapters
        if gate is None:
            return 0
        return sum(
            gate.is_runnable(s) and (s.lease is not None or not gate.can_admit(s))
            for s in self.waiting
        )

    def add(self, sequence: PoolingSequence) -> None:
        """Queue a new text."""
        self.waiting.append(sequence)

    def finish(self, sequence: PoolingSequence) -> None:
        """Forget a text and give back its slots."""
        self.waiting.remove(sequence)
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None

    def take_failed(self) -> list[tuple[PoolingSequence, Exception]]:
        """Remove the texts and claims whose adapters cannot be had, with the reason for each."""
        gate = self._adapters
        if gate is None:
            return []
        failed = [(s, error) for s in self.waiting if (error := gate.failure(s)) is not None]
        for sequence, _ in failed:
            self.finish(sequence)
        for claim in list(self.claims):
            error = gate.failure(claim)
            if error is not None:
                self.claims.remove(claim)
                claim.fail(error)
        gate.forget_failures()
        return failed

    def fail_claims(self, error: Exception) -> None:
        """End every claim."""
        claims, self.claims = self.claims, []
        for claim in claims:
            claim.fail(error)

    def schedule(self) -> list[PoolingSequence]:
        """Choose the next step's texts; empty when nothing can run now.

        The chosen ones hold their slots until `finish`.
        """
        if self._adapters is not None:
            self._adapters.prefetch([*self.claims, *self.waiting])
        self._shares.settle(s.adapter_digests for s in self.waiting)
        is_kept = self._serve_claims()
        chosen: list[PoolingSequence] = []
        budget = self.limits.max_num_batched_tokens
        for sequence in self._shares.in_turn(self.waiting):
            if len(chosen) == self.limits.max_num_seqs or budget <= 0:
                break
            if sequence.num_tokens > budget and chosen:
                continue
            is_kept = self._begin(sequence, is_kept=is_kept) or is_kept
            if sequence.is_ready:
                self._tell_slot_wait(sequence)
                chosen.append(sequence)
                budget -= sequence.num_tokens
                self._shares.charge(sequence.adapter_digests, sequence.num_tokens)
        return chosen

    def _serve_claims(self) -> bool:
        """Give claims the slots there are; tell whether one still waits for room."""
        gate = self._adapters
        if gate is None:
            return False
        blocked = False
        for claim in self.claims:
            if claim.lease is None and gate.is_runnable(claim):
                if gate.can_admit(claim):
                    claim.lease = gate.begin(claim)
                else:
                    blocked = True
        ready = [claim for claim in self.claims if claim.is_ready]
        self.claims = [claim for claim in self.claims if not claim.is_ready]
        for claim in ready:
            claim.settle()
        return blocked

    def _begin(self, sequence: PoolingSequence, *, is_kept: bool) -> bool:
        """Get slots for a text's adapters if that is possible.

        Args:
            sequence: who is to get slots.
            is_kept: somebody before it waits for room, so that it may take none.

        Returns:
            Whether it waits for room.
        """
        gate = self._adapters
        if gate is None or not sequence.adapter_digests or sequence.lease is not None:
            return False
        if not gate.is_runnable(sequence):
            return False
        is_short = False
        if not is_kept or sequence.adapter_digests <= self._held():
            is_short = not gate.can_admit(sequence)
            if not is_short:
                sequence.lease = gate.begin(sequence)
        if not sequence.is_ready and sequence.blocked_since_s is None:
            sequence.blocked_since_s = self._clock()
        return is_short

    def _tell_slot_wait(self, sequence: PoolingSequence) -> None:
        if sequence.blocked_since_s is not None and self._on_slot_wait is not None:
            self._on_slot_wait(self._clock() - sequence.blocked_since_s)

    def _held(self) -> frozenset[str]:
        """Adapters whose slots are taken anyway."""
        assert self._adapters is not None
        digests = {digest for s in self.waiting for digest in s.adapter_digests}
        leased = {digest for s in self.waiting if s.lease for digest in s.adapter_digests}
        return frozenset(leased | {d for d in digests - leased if self._adapters.is_pinned(d)})
