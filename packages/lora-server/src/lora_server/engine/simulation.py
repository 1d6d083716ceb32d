"""A scheduler whose steps nobody computes: tokens just appear, and time is moved by hand.

For tests and simulations of waits and fairness; the block pool and the adapter cache are real.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_cache import AdapterCache

from .kv import BlockPool
from .request import AdapterUse, GenerationRequest, SamplingParams
from .scheduler import Scheduler, SchedulerLimits
from .sequence import SequenceState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lora_cache import Lease

    from .scheduler import AdapterUser


class NoCopies:
    """A device to which nothing needs to be copied."""

    def place(self, key: str, value: str, slot: int) -> None:
        """Nothing to copy: only residency matters here."""

    def clear(self, slot: int) -> None:
        """Nothing to clear."""


class Gate:
    """Adapter admission over a real cache in which every adapter is already in the host tier."""

    def __init__(
        self, num_slots: int, names: Iterable[str], *, writes_at_once: bool = True
    ) -> None:
        """Register adapters.

        Args:
            num_slots: slots of the device.
            names: the adapters, by what stands for their digests.
            writes_at_once: whether slots are written when they are asked for, or by `write`.
        """
        self.writes: list[tuple[str, int]] = []
        self.writes_at_once = writes_at_once
        self.cache: AdapterCache[str, str] = AdapterCache(
            placer=NoCopies(), num_slots=num_slots, max_host=64
        )
        for name in names:
            self.cache.register(name, name, size_bytes=1)

    def prefetch(self, users: Iterable[AdapterUser]) -> None:
        """All are resident."""

    def failure(self, user: AdapterUser) -> Exception | None:
        """Return what ended the lease."""
        return None if user.lease is None else user.lease.failure

    def forget_failures(self) -> None:
        """None are remembered."""

    def is_runnable(self, user: AdapterUser) -> bool:  # noqa: ARG002 - the signature is given
        """All are resident."""
        return True

    def can_admit(self, user: AdapterUser) -> bool:
        """Ask the cache."""
        return self.cache.can_admit(user.adapter_digests)

    def begin(self, user: AdapterUser) -> Lease[str]:
        """Hold the slots; `write` says when they are written."""
        lease, moves = self.cache.begin(user.adapter_digests)
        self.writes += [(move.key, move.slot) for move in moves]
        if self.writes_at_once:
            self.write()
        return lease

    def write(self) -> None:
        """Write all slots that wait for it."""
        for key, slot in self.writes:
            self.cache.finish(key, slot)
        self.writes.clear()

    def is_pinned(self, digest: str) -> bool:
        """Ask the cache."""
        return self.cache.is_pinned(digest)


class Clock:
    """A clock that stands still until `now` is set."""

    def __init__(self) -> None:
        """Start at zero."""
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now


class Bench:
    """A scheduler whose steps are computed by nobody: tokens just appear."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        budget: int = 16,
        seqs: int = 8,
        gate: Gate | None = None,
        wait: float = 2.0,
        prefixes: bool = True,
    ) -> None:
        """Make a scheduler with nothing to do; the arguments are its limits."""
        self.clock = Clock()
        self.pool = BlockPool(blocks, keeps_prefixes=prefixes)
        self.gate = gate
        limits = SchedulerLimits(
            max_num_seqs=seqs, max_num_batched_tokens=budget, block_size=4, max_adapter_wait_s=wait
        )
        self.slot_waits: list[float] = []
        """What sequences waited for slots, in the order in which they began to run."""
        self.scheduler = Scheduler(
            limits=limits,
            pool=self.pool,
            adapters=gate,
            clock=self.clock,
            on_slot_wait=self.slot_waits.append,
        )
        self.serial = 0

    def add(
        self,
        prompt: int | tuple[int, ...],
        new: int,
        adapter: str | None = None,
        leader: SequenceState | None = None,
    ) -> SequenceState:
        """Queue a sequence.

        Args:
            prompt: its tokens, or how many.
            new: tokens it generates.
            adapter: None for the base.
            leader: the sequence whose prompt it shares.
        """
        self.serial += 1
        request = GenerationRequest(
            request_id=f"r{self.serial}",
            prompt_token_ids=tuple(range(prompt)) if isinstance(prompt, int) else prompt,
            sampling=SamplingParams(max_tokens=new),
            adapters=(AdapterUse(digest=adapter),) if adapter else (),
        )
        sequence = SequenceState(request, 0, None)
        sequence.leader = leader
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[SequenceState, int]:
        """Let one step pass; tokens computed by sequence.

        Raises:
            AssertionError: the step has too many tokens, or a sequence too few blocks.
        """
        chunks = self.scheduler.schedule()
        assert sum(c.num_tokens for c in chunks) <= self.scheduler.limits.max_num_batched_tokens
        for chunk in chunks:
            s = chunk.sequence
            assert len(s.block_ids) * 4 >= s.num_computed + chunk.num_tokens
            s.num_computed += chunk.num_tokens
            for i, key in enumerate(s.keys_of_full_blocks(s.num_computed, 4)):
                self.pool.remember(s.block_ids[i], key)
            if s.num_pending == 0:
                s.token_ids.append(7)
                if s.num_generated >= s.sampling.max_tokens:
                    self.scheduler.finish(s)
        return {c.sequence: c.num_tokens for c in chunks}
