"""A plan that stays from step to step: every unfinished sequence decodes, in the blocks it has.

Nearly all steps are such steps, and nothing has to be decided in them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .fairness import TokenShares
    from .scheduler import ScheduledChunk


class SteadyPlan:
    """One token for each sequence, as long as their blocks have room. Owned by the scheduler."""

    __slots__ = ("_charges", "_num_left", "chunks")

    def __init__(self, chunks: tuple[ScheduledChunk, ...], *, num_left: int) -> None:
        """Keep a plan.

        Args:
            chunks: what each sequence computes.
            num_left: further steps for which their blocks have room.
        """
        self.chunks = chunks
        self._num_left = num_left
        self._charges = tuple(Counter(s.adapter_digests for s, _ in chunks).items())

    @classmethod
    def of(cls, chunks: tuple[ScheduledChunk, ...], block_size: int) -> Self | None:
        """Return what can be kept of the plan of the step to come; None where that is nothing."""
        if not all(len(s.token_ids) - s.num_computed == 1 for s, _ in chunks):
            return None
        room = (len(s.block_ids) * block_size - s.num_computed for s, _ in chunks)
        num_left = min(room, default=1) - 1
        return cls(chunks, num_left=num_left) if num_left > 0 else None

    def again(self, shares: TokenShares) -> Sequence[ScheduledChunk] | None:
        """Return the plan for one more step and charge its tokens; None when it has ended."""
        if not self._num_left:
            return None
        self._num_left -= 1
        for digests, count in self._charges:
            shares.charge(digests, count)
        return self.chunks
