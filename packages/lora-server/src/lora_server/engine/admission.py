"""Which waiting requests may run as far as their adapters are concerned.

An adapter is fetched into the host tier while its requests wait, beside the running steps; a
request becomes runnable when all its adapters are there, and runs when they also fit in the slots
beside the leased and pinned ones. Slots are written between steps, for a part of a step's time.
Knows nothing of KV blocks or token budgets.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from lora_cache import HostTierFullError, Residency
from lora_server.errors import EngineError, InvalidRequestError, UnknownAdapterError

from .journal import AdapterJournal

if TYPE_CHECKING:
    from lora_cache import Lease
    from lora_layers import LoraModelManager, PreparedAdapter

    from .prober import EffectProber
    from .scheduler import AdapterUser

Fetch = Callable[[str, str], None]
"""Starts reading the adapter (digest, path) in the background; the result comes back through
`AdapterAdmission.finish_fetch` on the engine thread."""


class AdapterAdmission:
    """The adapters the engine may be asked for, by digest. Owned by the engine thread."""

    def __init__(
        self,
        manager: LoraModelManager,
        *,
        host_capacity: int,
        fetch: Fetch,
        journal: AdapterJournal | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start without adapters.

        Args:
            manager: both tiers, and the slots.
            host_capacity: adapters that the host tier holds.
            fetch: starts a background read.
            journal: is told what happens to adapters; None keeps it in the log only.
            clock: seconds, for the time spent on writing slots.
        """
        self._manager = manager
        self._host_capacity = host_capacity
        self._fetch = fetch
        self.journal = journal if journal is not None else AdapterJournal()
        """What happens to adapters."""
        self._clock = clock
        self._writing_ends_s = -math.inf
        self._path_of: dict[str, str] = {}
        self._name_of: dict[str, str] = {}
        """For messages: the name under which each version was loaded last."""
        self._fetching: set[str] = set()
        self._arrived: dict[str, PreparedAdapter] = {}
        """Fetched, but the host tier was full of leased and pinned adapters."""
        self._failures: dict[str, Exception] = {}
        self.prober: EffectProber | None = None
        """Shows what adapters change; None leaves that out."""
        self.hits: Counter[str] = Counter()
        """Times each version was needed and was in its slot already."""

    @property
    def manager(self) -> LoraModelManager:
        """The manager of the model's adapters."""
        return self._manager

    @property
    def is_placing(self) -> bool:
        """Whether an adapter is on its way into its slot."""
        return self._manager.is_placing

    @property
    def is_busy(self) -> bool:
        """Whether `open_step` has slots to write, or a probe to run."""
        has_probe = self.prober is not None and self.prober.is_busy
        return has_probe or self._manager.has_slot_work

    def add(self, digest: str, prepared: PreparedAdapter, path: str, *, name: str) -> None:
        """Put a checked adapter in the host tier.

        When leased adapters fill the tier it stays on the disk, where a request will find it.

        Args:
            digest: the version.
            prepared: what was read of it.
            path: where it can be read again.
            name: what it is called in messages.

        Raises:
            InvalidRequestError: pinned adapters leave no room, or it is larger than the tier.
        """
        if digest not in self._manager and not self._manager.restore(digest):
            try:
                self._manager.register(digest, prepared)
            except HostTierFullError as error:
                self._refuse_if_pinned(error, name)
        self._failures.pop(digest, None)
        self._path_of[digest] = path
        self._name_of[digest] = name
        self.journal.known(digest, name, prepared.nbytes)

    def _refuse_if_pinned(self, error: HostTierFullError, name: str) -> None:
        """Raise unless the end of some lease makes room in the host tier."""
        if error.max_bytes is not None and error.size_bytes > error.max_bytes:
            raise InvalidRequestError(str(error), param="lora_path") from error
        if set(error.kept) <= set(self._manager.pinned_keys()):
            pins = ", ".join(map(self.shown, self._manager.pinned_keys()))
            raise InvalidRequestError(
                f"host memory has no room for adapter {name!r}: {error.num_entries} of "
                f"{error.max_entries} adapters are there, and pinned are {pins}",
                param="lora_name",
            ) from error

    def retire(self, digest: str) -> None:
        """Refuse the adapter to new requests and free it once the last running one has ended."""
        self._path_of.pop(digest, None)
        self._name_of.pop(digest, None)
        self._failures.pop(digest, None)
        self._arrived.pop(digest, None)
        self.hits.pop(digest, None)
        self.journal.retired(digest)
        if self.prober is not None:
            self.prober.forget(digest)
        if digest in self._manager:
            self._manager.remove(digest)

    def check_pin(self, digest: str, *, replaced: str | None = None) -> None:
        """Refuse a pin that would take the last slot from all other adapters.

        Args:
            digest: what is to be pinned.
            replaced: a version whose pin ends with it.

        Raises:
            InvalidRequestError: it would; the pins are named.
        """
        pins = set(self._manager.pinned_keys()) - {digest, replaced}
        config = self._manager.config
        if len(pins) + 1 > config.max_loras - (0 if config.allow_pin_all else 1):
            names = ", ".join(map(self.shown, sorted(pins))) or "none"
            hint = "" if config.allow_pin_all else "; --allow-pin-all lets pins take every slot"
            raise InvalidRequestError(
                f"no slot is left to pin an adapter in: there are {config.max_loras}, and pinned "
                f"are {names}{hint}",
                param="lora_name",
            )

    def pin(self, digest: str, *, replaced: str | None = None) -> None:
        """Pin an adapter that is in a slot, in place of the pin of `replaced`.

        Raises:
            InvalidRequestError: as `check_pin`; nothing changed then.
        """
        self.check_pin(digest, replaced=replaced)
        if replaced is not None and replaced != digest and replaced in self._manager:
            self._manager.unpin(replaced)
        self._manager.pin(digest)

    def shown(self, digest: str) -> str:
        """Name a version in a message."""
        return f"{self._name_of[digest]!r}" if digest in self._name_of else digest[:12]

    def failure(self, user: AdapterUser) -> Exception | None:
        """Why it can never run, or None."""
        for digest in user.adapter_digests:
            if digest in self._failures:
                return self._failures[digest]
            if digest not in self._path_of:
                return UnknownAdapterError(f"adapter version {digest[:12]} is no longer loaded")
        if user.lease is not None and user.lease.failure is not None:
            names = ", ".join(map(self.shown, sorted(user.adapter_digests)))
            error = user.lease.failure
            return EngineError(f"adapter {names} could not be written into its slot: {error}")
        if user.lease is None and not self._manager.fits_beside_pins(user.adapter_digests):
            return self._pinned_out(user)
        return None

    def _pinned_out(self, user: AdapterUser) -> Exception:
        names = ", ".join(map(self.shown, sorted(user.adapter_digests)))
        pins = ", ".join(map(self.shown, self._manager.pinned_keys()))
        num_slots = self._manager.config.max_loras
        return InvalidRequestError(
            f"adapter {names} finds no slot: there are {num_slots}, and pinned are {pins}",
            param="model",
        )

    def is_runnable(self, user: AdapterUser) -> bool:
        """Whether all adapters have been read, so that only room may be missing."""
        known = user.adapter_digests
        return all(digest in self._manager or digest in self._arrived for digest in known)

    def can_admit(self, user: AdapterUser) -> bool:
        """Whether all adapters fit in slots now, beside leased and pinned ones."""
        if self._arrived:
            self._settle()
        return not user.adapter_digests or self._manager.can_admit(user.adapter_digests)

    def begin(self, user: AdapterUser) -> Lease[str]:
        """Lease the slots of its adapters; those that are absent are written as time allows."""
        digests = user.adapter_digests
        found = [d for d in digests if self._manager.residency(d) is Residency.DEVICE]
        lease = self._manager.begin(digests)
        self.hits.update(found)
        self._write_slots()
        thrash = self.journal.admitted(digests)
        if thrash is not None:
            self.journal.warn_of_thrash(
                thrash,
                num_slots=self._manager.config.max_loras,
                slot_bytes=self._manager.slot_bytes,
                host_capacity=self._host_capacity,
            )
        return lease

    def open_step(self, *, seconds: float) -> None:
        """Let slots be written until `seconds` from now, at once as far as there is work."""
        self._writing_ends_s = self._clock() + seconds
        self._write_slots()
        if self.prober is not None:
            self.prober.turn()

    def finish_writing(self) -> None:
        """Write every slot that waits for it; nothing else can run meanwhile."""
        self._advance(math.inf)
        if self.prober is not None:
            self.prober.turn()

    def rest(self) -> bool:
        """Write every slot that waits for it, and run a probe: nothing else can be done now.

        Returns:
            Whether there may be another probe to run.
        """
        self._advance(math.inf)
        return self.prober is not None and self.prober.rest()

    def _write_slots(self) -> None:
        if self._manager.has_slot_work:
            self._advance(max(self._writing_ends_s - self._clock(), 0.0))

    def _advance(self, seconds: float) -> None:
        for slot in self._manager.advance(seconds):
            self.journal.written(slot)

    def prefetch(self, users: Iterable[AdapterUser]) -> None:
        """Start fetching what the first sequences need, one more than the host tier can hold.

        The one more waits for room: its request counts as runnable, so that it is not passed over
        for ever while leased adapters fill the host tier.

        Args:
            users: running sequences first, then who waits, in the order of arrival.
        """
        window: dict[str, None] = {}
        limit = self._host_capacity + 1
        for digests in dict.fromkeys(user.adapter_digests for user in users):
            window.update(dict.fromkeys(digests))
            if len(window) >= limit:
                break
        wanted = list(window)[:limit]
        for digest in self._arrived.keys() - window.keys():
            del self._arrived[digest]  # those who waited for it are gone
        # Whoever makes room for a fetched adapter must not be one that is needed before it.
        self._manager.touch(wanted[::-1])
        busy = self._fetching | self._failures.keys() | self._arrived.keys()
        for digest in wanted:
            if digest not in self._manager and digest in self._path_of and digest not in busy:
                self._fetching.add(digest)
                self._fetch(digest, self._path_of[digest])

    def finish_fetch(
        self, digest: str, result: PreparedAdapter | Exception, *, seconds: float = 0.0
    ) -> None:
        """Take the outcome of a fetch. A failure ends the requests that wait for it, no others.

        Args:
            digest: what was to be read.
            result: what was read of it, or why it could not be.
            seconds: how long that took.
        """
        self._fetching.discard(digest)
        if digest not in self._path_of:
            return
        error = result if isinstance(result, Exception) else None
        self.journal.read_again(digest, seconds=seconds, error=error)
        if isinstance(result, Exception):
            shown = self.shown(digest)
            self._failures[digest] = EngineError(
                f"adapter {shown} (version {digest[:12]}) could not be read again: {result}"
            )
        elif digest not in self._manager:
            self._arrived[digest] = result
            self._settle()

    def forget_failures(self) -> None:
        """Let the next request for a failed adapter try again."""
        self._failures.clear()

    def _settle(self) -> None:
        """Put what has arrived in the host tier, as far as there is room."""
        for digest in list(self._arrived):
            try:
                self._manager.register(digest, self._arrived[digest])
            except HostTierFullError:
                return
            del self._arrived[digest]

    def is_pinned(self, digest: str) -> bool:
        """Whether the adapter must keep its slot."""
        return self._manager.is_pinned(digest)
