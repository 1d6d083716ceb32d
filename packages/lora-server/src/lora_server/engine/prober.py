"""When the probe of an adapter is run: one at a time, in a slot nobody needs.

Where the model allows it, it rides in the steps of running requests; when nothing else is to be
done, and on other models, it is a forward pass between two steps. An adapter that is in no slot is
brought into a free one for the probe, and leaves it again. Where none is free nobody has to make
room: the probe is run once a request has brought the adapter into a slot. Belongs to the engine
thread.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING

from lora_cache import CacheError
from lora_server.effect import ProbeState
from lora_server.logs import log_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from lora_cache import Lease
    from lora_layers import LoraModelManager
    from lora_server.effect import LogitShift

    from .probe import Probe
    from .riding_probe import RidingProbe
    from .scheduler import ScheduledChunk, Scheduler
    from .step_batch import StepRows

_log = logging.getLogger(__name__)


class EffectProber:
    """The adapters that wait for their probe, and what came of the others."""

    def __init__(
        self,
        manager: LoraModelManager,
        probe: Probe,
        *,
        shown: Callable[[str], str],
        ride: Callable[[str], RidingProbe] | None = None,
    ) -> None:
        """Begin without adapters.

        Args:
            manager: both tiers, and the slots.
            probe: compares one adapter with the base.
            shown: names a version in a message.
            ride: makes the probe of an adapter in pieces; None where it runs between steps only.
        """
        self._manager = manager
        self._probe = probe
        self._shown = shown
        self._new_ride = ride
        self._waiting: dict[str, Future[None]] = {}
        """In order of arrival; each ends when its probe has run, or never will."""
        self._visitor: tuple[str, Lease[str]] | None = None
        """The adapter that is in a slot for its probe alone."""
        self._ride: RidingProbe | None = None
        """The probe that is under way in running steps."""
        self._ride_lease: Lease[str] | None = None
        """Its slot."""
        self._shifts: dict[str, LogitShift | None] = {}

    def prepare(self) -> None:
        """Run what all probes share, so that the first adapter's is as fast as the others'."""
        try:
            self._probe.prepare()
        except Exception:  # noqa: BLE001 - each adapter's probe tries it again, and tells
            _log.warning("the base's run of the probe failed", exc_info=True)

    def ask(self, digest: str, *, is_idle: bool) -> Future[None] | None:
        """Have an adapter probed once.

        Args:
            digest: a registered version.
            is_idle: whether nothing else is to be done, so that it may be done at once.

        Returns:
            Ends when its probe has run; None where that is done, or no slot is free for it now.
        """
        if digest in self._shifts:
            return None
        future = self._waiting.setdefault(digest, Future())
        while is_idle and digest in self._waiting and self.rest():
            pass
        if digest not in self._waiting:
            return None
        is_soon = self._visitor is not None or self._has_free_slot()
        return future if is_soon or self._manager.slot_of(digest) is not None else None

    def state(self, digest: str) -> tuple[ProbeState, LogitShift | None]:
        """Return how far an adapter's probe has come, and its result."""
        if digest not in self._shifts:
            return ProbeState.WAITING, None
        shift = self._shifts[digest]
        return (ProbeState.FAILED if shift is None else ProbeState.DONE), shift

    def forget(self, digest: str) -> None:
        """Let go of everything about an adapter that is going away."""
        self._shifts.pop(digest, None)
        waiting = self._waiting.pop(digest, None)
        if waiting is not None:
            waiting.set_result(None)
        if self._ride is not None and self._ride.digest == digest:
            self._get_off()
        if self._visitor is not None and self._visitor[0] == digest:
            self._visitor[1].release()
            self._visitor = None

    @property
    def is_busy(self) -> bool:
        """Whether `turn` may take as long as a step."""
        return bool(self._waiting) and self._new_ride is None

    def turn(self) -> None:
        """Bring the next adapter into a slot, and run at most one probe that cannot ride.

        Call it between two steps.
        """
        if self._ride is None and self._waiting:
            self._go_on(may_run=self._new_ride is None)

    def rest(self) -> bool:
        """Run at most one probe whole, since nothing else is to be done.

        One that was riding starts over: that is a single forward pass.

        Returns:
            Whether one has ended, so that there may be another.
        """
        num_waiting = len(self._waiting)
        self._get_off()
        if self._waiting:
            self._go_on(may_run=True)
        if self._visitor is not None:
            self._manager.advance()
            self._go_on(may_run=True)
        return len(self._waiting) < num_waiting

    def riders(
        self, chunks: Sequence[ScheduledChunk], scheduler: Scheduler
    ) -> tuple[ScheduledChunk, ...]:
        """Return the piece of a probe that a step takes along; nothing where it has no room.

        Args:
            chunks: what the step computes for requests; not empty.
            scheduler: who chose them. Does not get to know of the probe's sequences.
        """
        if not self._waiting or self._new_ride is None:
            return ()
        limits = scheduler.limits
        room = limits.max_num_batched_tokens - sum(count for _, count in chunks)
        if self._ride is None and room > 1:
            self._board(scheduler, num_others=len(chunks))
        return () if self._ride is None else self._ride.next_chunks(room)

    def collect(self, logits: torch.Tensor, rows: StepRows) -> StepRows:
        """Take the riders out of a step that has been computed; return the others' rows."""
        ride = self._ride
        assert ride is not None, "a step has riders of a probe that does not ride"
        others = ride.collect(logits, rows)
        if ride.is_complete:
            self._end_ride(ride.shift())
        return others

    def fail_ride(self, error: Exception) -> None:
        """End the probe that rides, because a step failed for it."""
        if self._ride is not None:
            extra = self._fields(self._ride.digest)
            _log.error("the probe of an adapter failed", exc_info=error, extra=extra)
            self._end_ride(None)

    def _board(self, scheduler: Scheduler, *, num_others: int) -> None:
        """Have the next adapter that is in a slot begin its ride, if there are blocks for it."""
        digest = self._next_in_slot()
        if digest is None or self._new_ride is None:
            return
        ride = self._new_ride(digest)
        block_size = scheduler.limits.block_size
        if ride.board(scheduler.pool, block_size=block_size, num_others=num_others):
            self._ride, self._ride_lease = ride, self._manager.begin([digest])

    def _get_off(self) -> None:
        """Give up what a ride holds; its adapter waits as before."""
        if self._ride is not None and self._ride_lease is not None:
            self._ride.leave()
            self._ride_lease.release()
            self._ride = self._ride_lease = None

    def _end_ride(self, shift: LogitShift | None) -> None:
        """Take the result of a ride, and its adapter out of a slot where it is alone for that."""
        assert self._ride is not None
        digest = self._ride.digest
        self._get_off()
        self._settle(digest, shift)
        if self._visitor is not None:
            self._see_off()

    def _next_in_slot(self) -> str | None:
        """The adapter that can be probed now."""
        if self._visitor is not None:
            digest, lease = self._visitor
            return digest if lease.is_ready else None
        return next((d for d in self._waiting if self._manager.slot_of(d) is not None), None)

    def _go_on(self, *, may_run: bool) -> None:
        """Run a probe whose adapter is in a slot, if it may be run; else bring one into a slot."""
        if self._visitor is not None and self._visitor[1].failure is not None:
            digest, _ = self._visitor
            self._visitor = None
            self._settle(digest, None)
            return
        ready = self._next_in_slot()
        if ready is None and self._visitor is None:
            self._invite()
        elif ready is not None and may_run:
            self._run(ready)
            if self._visitor is not None:
                self._see_off()

    def _see_off(self) -> None:
        """Take the visitor out of its slot."""
        assert self._visitor is not None
        digest, lease = self._visitor
        self._visitor = None
        lease.release()
        try:
            self._manager.deactivate(digest)
        except CacheError:
            _log.debug("an adapter stays in its slot: a request came for it meanwhile")

    def _invite(self) -> None:
        """Bring the first adapter that is in host memory into a slot, if one is free."""
        if not self._has_free_slot():
            return
        for digest in self._waiting:
            if digest in self._manager:
                self._visitor = (digest, self._manager.begin([digest]))
                return

    def _has_free_slot(self) -> bool:
        stats = self._manager.stats()
        return stats.slots_used + stats.slots_placing < stats.num_slots

    def _run(self, digest: str) -> None:
        """Probe an adapter that is in a slot; whatever happens is told, and ends no request."""
        try:
            shift = self._probe.measure(digest)
        except Exception:  # noqa: BLE001 - its requests would fail too, and say so themselves
            _log.exception("the probe of an adapter failed", extra=self._fields(digest))
            shift = None
        self._settle(digest, shift)

    def _settle(self, digest: str, shift: LogitShift | None) -> None:
        self._shifts[digest] = shift
        self._waiting.pop(digest).set_result(None)
        if shift is None:
            _log.warning("the probe of an adapter gave no numbers", extra=self._fields(digest))
        elif shift.is_weak:
            _log.warning(
                "an adapter hardly changes the answer to the probe",
                extra=self._fields(digest, max_shift=shift.max, mean_shift=shift.mean, kl=shift.kl),
            )

    def _fields(self, digest: str, **numbers: float | None) -> dict[str, object]:
        return dict(log_fields(adapter=self._shown(digest), digest=digest[:12], **numbers))
