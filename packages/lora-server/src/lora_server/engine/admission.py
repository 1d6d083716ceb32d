"""Which waiting requests may run as far as their adapters are concerned.

An adapter is fetched into the host tier while its requests wait, beside the running steps; a
request becomes runnable when all its adapters are there, and runs when they also fit in the slots
beside the leased and pinned ones. Knows nothing of KV blocks or token budgets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from lora_cache import HostTierFullError
from lora_server.errors import EngineError, UnknownAdapterError

if TYPE_CHECKING:
    from lora_cache import Lease
    from lora_layers import LoraModelManager, PreparedAdapter

    from .sequence import SequenceState

_log = logging.getLogger(__name__)

Fetch = Callable[[str, str], None]
"""Starts reading the adapter (digest, path) in the background; the result comes back through
`AdapterAdmission.finish_fetch` on the engine thread."""


class AdapterAdmission:
    """The adapters the engine may be asked for, by digest. Owned by the engine thread."""

    def __init__(self, manager: LoraModelManager, *, host_capacity: int, fetch: Fetch) -> None:
        self._manager = manager
        self._host_capacity = host_capacity
        self._fetch = fetch
        self._path_of: dict[str, str] = {}
        self._fetching: set[str] = set()
        self._arrived: dict[str, PreparedAdapter] = {}
        """Fetched, but the host tier was full of leased and pinned adapters."""
        self._failures: dict[str, Exception] = {}

    @property
    def manager(self) -> LoraModelManager:
        """The manager of the model's adapters."""
        return self._manager

    def add(self, digest: str, prepared: PreparedAdapter, path: str) -> None:
        """Put a checked adapter in the host tier; `path` is where it can be read again."""
        if digest not in self._manager and not self._manager.restore(digest):
            self._manager.register(digest, prepared)
        self._failures.pop(digest, None)
        self._path_of[digest] = path

    def retire(self, digest: str) -> None:
        """Refuse the adapter to new requests and free it once the last running one has ended."""
        self._path_of.pop(digest, None)
        self._failures.pop(digest, None)
        self._arrived.pop(digest, None)
        if digest in self._manager:
            self._manager.remove(digest)

    def failure(self, sequence: SequenceState) -> Exception | None:
        """Why the sequence can never run, or None."""
        for digest in sequence.adapter_digests:
            if digest in self._failures:
                return self._failures[digest]
            if digest not in self._path_of:
                return UnknownAdapterError(f"adapter version {digest[:12]} is no longer loaded")
        return None

    def is_runnable(self, sequence: SequenceState) -> bool:
        """Whether all adapters have been read, so that only room may be missing."""
        known = sequence.adapter_digests
        return all(digest in self._manager or digest in self._arrived for digest in known)

    def can_admit(self, sequence: SequenceState) -> bool:
        """Whether all adapters fit in slots now, beside leased and pinned ones."""
        if self._arrived:
            self._settle()
        return not sequence.adapter_digests or self._manager.can_admit(sequence.adapter_digests)

    def acquire(self, sequence: SequenceState) -> Lease[str] | None:
        """Lease the slots of the sequence's adapters; None for a base request."""
        if not sequence.adapter_digests:
            return None
        return self._manager.acquire(sequence.adapter_digests)

    def prefetch(self, sequences: Iterable[SequenceState]) -> None:
        """Start fetching what the first sequences need, one more than the host tier can hold.

        The one more waits for room: its request counts as runnable, so that it is not passed over
        for ever while leased adapters fill the host tier.

        Args:
            sequences: running ones first, then waiting ones in the order they will be admitted.
        """
        window: dict[str, None] = {}
        limit = self._host_capacity + 1
        for sequence in sequences:
            window.update(dict.fromkeys(sequence.adapter_digests))
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

    def finish_fetch(self, digest: str, result: PreparedAdapter | Exception) -> None:
        """Take the outcome of a fetch. A failure ends the requests that wait for it, no others."""
        self._fetching.discard(digest)
        if digest not in self._path_of:
            return
        if isinstance(result, Exception):
            _log.error("adapter %s could not be read again: %s", digest[:12], result)
            self._failures[digest] = EngineError(
                f"adapter version {digest[:12]} could not be read again: {result}"
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
