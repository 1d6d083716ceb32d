"""When the probe of an adapter is run: between steps, one at a time, in a slot nobody needs.

An adapter that is in no slot is brought into a free one for the probe, and leaves it again. Where
none is free nobody has to make room: the probe is run once a request has brought the adapter into a
slot. Belongs to the engine thread.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import TYPE_CHECKING

from lora_cache import CacheError
from lora_server.effect import ProbeState
from lora_server.logs import log_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from lora_cache import Lease
    from lora_layers import LoraModelManager
    from lora_server.effect import LogitShift

    from .probe import Probe

_log = logging.getLogger(__name__)


class EffectProber:
    """The adapters that wait for their probe, and what came of the others."""

    def __init__(
        self, manager: LoraModelManager, probe: Probe, *, shown: Callable[[str], str]
    ) -> None:
        """Begin without adapters.

        Args:
            manager: both tiers, and the slots.
            probe: compares one adapter with the base.
            shown: names a version in a message.
        """
        self._manager = manager
        self._probe = probe
        self._shown = shown
        self._waiting: dict[str, Future[None]] = {}
        """In order of arrival; each ends when its probe has run, or never will."""
        self._visitor: tuple[str, Lease[str]] | None = None
        """The adapter that is in a slot for its probe alone."""
        self._shifts: dict[str, LogitShift | None] = {}

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
        for _ in range(2 * len(self._waiting) if is_idle else 0):
            self.turn()
            if self._visitor is not None:
                self._manager.advance()
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
        if self._visitor is not None and self._visitor[0] == digest:
            self._visitor[1].release()
            self._visitor = None

    @property
    def is_busy(self) -> bool:
        """Whether `turn` has anything to do."""
        return bool(self._waiting) or self._visitor is not None

    def turn(self) -> None:
        """Run at most one probe; call it between two steps."""
        if not self.is_busy:
            return
        if self._visitor is not None:
            self._serve_visitor(*self._visitor)
            return
        for digest in self._waiting:
            if self._manager.slot_of(digest) is not None:
                self._run(digest)
                return
        self._invite()

    def _serve_visitor(self, digest: str, lease: Lease[str]) -> None:
        """Probe the adapter that is in a slot for that, once it is written, and take it out."""
        if lease.failure is None and not lease.is_ready:
            return
        self._visitor = None
        if lease.failure is not None:
            lease.release()
            self._settle(digest, None)
            return
        self._run(digest)
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
