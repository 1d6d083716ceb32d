"""A plan that stays from step to step: every unfinished sequence decodes.

Nearly all steps are such steps, and nothing has to be decided in them. Sequences whose blocks are
full get one more each; with no block left for one of them the plan ends.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .fairness import TokenShares
    from .kv import BlockPool
    from .scheduler import ScheduledChunk
    from .sequence import SequenceState


class SteadyPlan:
    """One token for each sequence, as long as there are blocks. Owned by the scheduler."""

    __slots__ = ("_at", "_charges", "_growing", "chunks")

    def __init__(self, chunks: tuple[ScheduledChunk, ...], block_size: int) -> None:
        """Keep a plan; see `of`."""
        self.chunks = chunks
        self._charges = tuple(Counter(s.adapter_digests for s, _ in chunks).items())
        self._growing: list[list[SequenceState]] = [[] for _ in range(block_size)]
        """Who begins a block in the next step, in the one after it, and so on; then again."""
        for sequence, _ in chunks:
            self._growing[-(sequence.num_computed + 1) % block_size].append(sequence)
        self._at = 0

    @classmethod
    def of(cls, chunks: tuple[ScheduledChunk, ...], block_size: int) -> Self | None:
        """Return what can be kept of the plan of the step to come; None where that is nothing."""
        if not all(len(s.token_ids) - s.num_computed == 1 for s, _ in chunks):
            return None
        return cls(chunks, block_size)

    def again(self, shares: TokenShares, pool: BlockPool) -> Sequence[ScheduledChunk] | None:
        """Return the plan for one more step; None when there are too few blocks for it.

        Args:
            shares: is charged for the step's tokens.
            pool: gives the blocks that the step needs.
        """
        if growing := self._growing[self._at]:
            size = len(self._growing)
            growing = [s for s in growing if s.num_computed >= len(s.block_ids) * size]
            if not pool.can_allocate(len(growing)):
                return None
            for sequence, block in zip(growing, pool.allocate(len(growing)), strict=True):
                sequence.block_ids.append(block)
        self._at = (self._at + 1) % len(self._growing)
        for digests, count in self._charges:
            shares.charge(digests, count)
        return self.chunks
