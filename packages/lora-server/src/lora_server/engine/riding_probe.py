"""The probe of one adapter in pieces, which go along in the steps of running requests.

The base's weights are read once for the step and its riders, so that a step grows by a few rows
instead of being followed by a whole forward pass. Does not know when it rides: see `prober`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lora_server.effect import LogitShift, ShiftOf

from .kv_layout import int64_array
from .request import AdapterUse, GenerationRequest, SamplingParams
from .scheduler import ScheduledChunk
from .sequence import SequenceState
from .shift import Piece, compare_rows, join_pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from .kv import BlockPool
    from .step_batch import StepRows

MAX_RIDING_TOKENS: Final = 2
"""Tokens of either sequence in one step. A row costs a small step little beside the base's weights,
which are read anyway; the adapter's own weights are read anew in each of these steps. float32 has
products that only read weights for up to three rows, and takes 1.6 times as long with four. With
two the 16 tokens are through after eight steps, within the second that a load waits for them."""


class RidingProbe:
    """The probe's text with an adapter, and with the base, as sequences beside the scheduler.

    Both have their pieces in the same steps, equally long: rounding depends on a step's shape, in
    bfloat16 by more than a weak adapter moves anything, and so it is the same for both. In float32
    it is far too little to matter: there the base's part can have been computed before.
    Belongs to the engine thread.
    """

    def __init__(
        self,
        digest: str,
        token_ids: Sequence[int],
        *,
        clear_blocks: Callable[[Sequence[int]], None],
        reference: torch.Tensor | None,
    ) -> None:
        """Prepare; nothing is held yet.

        Args:
            digest: the adapter, which must stay in its slot from the first step to the last.
            token_ids: what is asked, at least one.
            clear_blocks: writes zeros over blocks of the KV cache.
            reference: log-probabilities `[P, V]` of the base; None lets the base ride too.
        """
        self.digest = digest
        self._clear_blocks = clear_blocks
        self._reference = reference
        self._own = _sequence(token_ids, (AdapterUse(digest=digest),))
        self._riders = (self._own,) if reference is not None else (self._own, _sequence(token_ids))
        self._pool: BlockPool | None = None
        """Whose blocks it holds."""
        self._pieces: list[Piece] = []

    @property
    def is_complete(self) -> bool:
        """Whether all tokens have been computed."""
        return not self._own.num_pending

    def board(self, pool: BlockPool, *, block_size: int, num_others: int) -> bool:
        """Take the KV blocks of the sequences, if that makes nobody wait or start over.

        Args:
            pool: the blocks.
            block_size: tokens of a block.
            num_others: running sequences, each of which may need another block soon.
        """
        count = -(-self._own.num_tokens // block_size)
        if not pool.can_allocate(len(self._riders) * count + num_others):
            return False
        self._pool = pool
        for sequence in self._riders:
            sequence.block_ids = int64_array(pool.allocate(count))
        return True

    def next_chunks(self, room: int) -> tuple[ScheduledChunk, ...]:
        """Return the next piece of each sequence; nothing where the step has no room for them.

        Args:
            room: tokens that the step could compute besides.
        """
        count = min(MAX_RIDING_TOKENS, room // len(self._riders), self._own.num_pending)
        if count <= 0:
            return ()
        return tuple(ScheduledChunk(sequence, count) for sequence in self._riders)

    def collect(self, logits: torch.Tensor, rows: StepRows) -> StepRows:
        """Take the riders' rows out of a step that has been computed; return the others' rows.

        Args:
            logits: of the whole step.
            rows: whose they are; the pieces of `next_chunks` are among them.
        """
        scores = {
            found.sequence: logits[found.first : found.first + found.num_rows]
            .float()
            .log_softmax(dim=-1)
            for found in rows.logits_rows
            if found.sequence in self._riders
        }
        own, first = scores[self._own], self._own.num_computed
        base = self._reference
        base = scores[self._riders[-1]] if base is None else base[first : first + len(own)]
        # Compared piece by piece, so that no single step has all the arithmetic.
        shift = compare_rows(base, own, of=ShiftOf.LOG_PROBABILITIES)
        self._pieces.append(Piece(len(own), shift))
        for sequence in self._riders:
            sequence.num_computed += len(own)
        return rows.without(self._riders)

    def shift(self) -> LogitShift | None:
        """Return how far the adapter moves the base; None where a number is not finite."""
        return join_pieces(self._pieces)

    def leave(self) -> None:
        """Give the blocks back, as far as they are held.

        They are cleared: what an adapter computed may not be finite, and the next user of a block
        multiplies what lies beyond its own tokens by zero.
        """
        pool, self._pool = self._pool, None
        if pool is None:
            return
        blocks = [block for sequence in self._riders for block in sequence.block_ids]
        for sequence in self._riders:
            sequence.block_ids = int64_array()
        self._clear_blocks(blocks)
        pool.release(blocks)


def _sequence(token_ids: Sequence[int], adapters: tuple[AdapterUse, ...] = ()) -> SequenceState:
    """Return a sequence of which every row reaches the logits, and which generates nothing."""
    request = GenerationRequest(
        request_id="effect-probe",
        prompt_token_ids=tuple(token_ids),
        sampling=SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0),
        adapters=adapters,
    )
    return SequenceState(request, 0, None)
