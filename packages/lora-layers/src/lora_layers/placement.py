"""SlotQueue: writes adapters into slots a few modules at a time, between two steps.

A slot on its way is read by nobody, so that the steps go on while it is being written. Knows slots
and prepared tensors; which adapter goes where is the cache's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lora_layers.activate import SlotWriter
    from lora_layers.content import PreparedAdapter
    from lora_layers.staging import Stager, Upload

NUM_UPLOADS = 2
"""Adapters on their way to the device at once: the one being written and the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSlot:
    """What came of one write."""

    key: str
    """Whose it was."""
    slot: int
    """Where."""
    seconds: float
    """Time that the writes took, without the pauses between them."""
    error: Exception | None = None
    """Why the slot holds nothing; None when all is there."""


@dataclass(slots=True, kw_only=True)
class _Job:
    """One adapter on its way into one slot."""

    key: str
    value: PreparedAdapter
    slot: int
    upload: Upload[PreparedAdapter] | None = None
    pieces: Iterator[None] | None = None
    seconds: float = 0.0


class SlotQueue:
    """The `lora_cache.Placer` of a model that can also take its time.

    `place` writes at once. `begin` writes as `advance` is called, first come first served; with
    `is_paced` removed adapters' slots are cleared that way too, when there is nothing to write.
    """

    def __init__(
        self,
        writer: SlotWriter,
        stager: Stager,
        *,
        is_paced: bool,
        clock: Callable[[], float],
    ) -> None:
        """Write with `writer` what `stager` brings to the device; `clock` returns seconds."""
        self._writer = writer
        self._stager = stager
        self._is_paced = is_paced
        self._clock = clock
        self._jobs: dict[int, _Job] = {}  # by slot, in the order of arrival
        self._clears: dict[int, Iterator[None]] = {}  # slots to be cleared

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to do."""
        return not self._jobs and not self._clears

    @property
    def is_placing(self) -> bool:
        """Whether an adapter is on its way into a slot."""
        return bool(self._jobs)

    def place(self, key: str, value: PreparedAdapter, slot: int) -> None:
        """Write an adapter into a slot at once; see `SlotWriter.place`."""
        self._drop(slot)
        self._writer.place(key, value, slot)

    def clear(self, slot: int) -> None:
        """Zero a slot that nobody uses any more."""
        self._drop(slot)
        if self._is_paced:
            self._clears[slot] = self._writer.clear_by_module(slot)
        else:
            self._writer.clear(slot)

    def begin(self, key: str, value: PreparedAdapter, slot: int) -> None:
        """Write an adapter into a slot, over what is there, as `advance` is called."""
        self._drop(slot)
        self._jobs[slot] = _Job(key=key, value=value, slot=slot)
        self._start_uploads()

    def advance(self, seconds: float) -> list[WrittenSlot]:
        """Work for about `seconds`, a module at least; wait for copies only if it is infinite.

        Returns:
            The slots that were completed, or failed.
        """
        written: list[WrittenSlot] = []
        end_s = self._clock() + seconds
        while self._jobs and seconds > 0:
            job = next(iter(self._jobs.values()))
            if not self._has_arrived(job, wait=math.isinf(seconds)):
                return written
            outcome = self._advance_job(job, end_s)
            if outcome is None:
                return written
            del self._jobs[job.slot]
            self._start_uploads()
            written.append(outcome)
            if self._clock() >= end_s:
                return written
        while self._clears and seconds > 0:
            slot, pieces = next(iter(self._clears.items()))
            for _ in pieces:
                if self._clock() >= end_s:
                    return written
            del self._clears[slot]
        return written

    def _drop(self, slot: int) -> None:
        """Forget a slot: somebody else has it now."""
        self._jobs.pop(slot, None)
        self._clears.pop(slot, None)

    def _start_uploads(self) -> None:
        for job in islice(self._jobs.values(), NUM_UPLOADS):
            if job.upload is None:
                job.upload = self._stager.start(job.value)

    def _has_arrived(self, job: _Job, *, wait: bool) -> bool:
        self._start_uploads()
        assert job.upload is not None, "the first job is always on its way"
        if wait:
            job.upload.wait()
        return job.upload.is_done()

    def _advance_job(self, job: _Job, end_s: float) -> WrittenSlot | None:
        """Write modules until the job or the time is over; None when it is the time."""
        assert job.upload is not None
        start_s = self._clock()
        error: Exception | None = None
        try:
            if job.pieces is None:
                job.pieces = self._writer.write_by_module(job.upload.value, job.slot)
            for _ in job.pieces:
                now_s = self._clock()
                if now_s >= end_s:
                    job.seconds += now_s - start_s
                    return None
        except Exception as failure:  # noqa: BLE001 - whatever it is, those who wait are told
            self._writer.clear(job.slot)
            error = failure
        job.seconds += self._clock() - start_s
        return WrittenSlot(key=job.key, slot=job.slot, seconds=job.seconds, error=error)
