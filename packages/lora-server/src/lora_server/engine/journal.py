"""AdapterJournal: every move of an adapter is one log line, a sample of a metric, and a span.

Knows what versions are called; decides nothing.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lora_server.exchange import current_exchange
from lora_server.logs import DIGEST_CHARS, log_fields
from lora_server.metrics import ServerMetrics
from lora_server.traces import TracedLoad

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from lora_cache import Tier
    from lora_layers import WrittenSlot
    from lora_server.metrics import Thrash
    from lora_server.traces import Traces

_log = logging.getLogger(__name__)

_DISK: Final = "disk"
_SLOT: Final = "slot"
_MS: Final = 1000.0
_MIB: Final = 1024**2


@dataclass(frozen=True, slots=True)
class _Version:
    """What a digest is called, and how large it is."""

    name: str
    size_bytes: int


class AdapterJournal:
    """Takes note. Methods say which thread calls them."""

    def __init__(
        self,
        metrics: ServerMetrics | None = None,
        traces: Traces | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin an empty journal.

        Args:
            metrics: where times are counted; None counts them for nobody.
            traces: where spans go; None makes none.
            clock: seconds, for how long an adapter was somewhere.
        """
        self._metrics = metrics or ServerMetrics()
        self._traces = traces
        self._clock = clock
        self._versions: dict[str, _Version] = {}
        """By digest; owned by the engine's thread."""
        self._since_s: dict[tuple[str, str], float] = {}
        """When a version came into a tier, by digest and tier; owned by the engine's thread."""

    # -- the event loop's thread, and the main thread before it ------------------------------------

    def loaded(
        self,
        name: str,
        digest: str,
        *,
        rank: int,
        size_bytes: int,
        seconds: float,
        replaced: str | None = None,
    ) -> None:
        """Note that a name stands for a version now, instead of `replaced` if that is given."""
        _log.info(
            "Loaded LoRA adapter" if replaced is None else "Updated LoRA adapter",
            extra=log_fields(
                adapter=name,
                digest=digest[:DIGEST_CHARS],
                replaced=None if replaced is None else replaced[:DIGEST_CHARS],
                ms=seconds * _MS,
                bytes=size_bytes,
                rank=rank,
            ),
        )
        self._note_load(_DISK, name, digest, size_bytes, seconds)

    def load_failed(self, name: str, error: Exception, *, seconds: float) -> None:
        """Note that an adapter could not be loaded under a name."""
        _log.warning(
            "Could not load LoRA adapter",
            extra=log_fields(adapter=name, ms=seconds * _MS, reason=str(error)),
        )
        self._note_load(_DISK, name, None, None, seconds, error=error)

    def unloaded(self, name: str, digest: str, *, size_bytes: int, seconds: float) -> None:
        """Note that a name stands for nothing any more, `seconds` after it was loaded."""
        _log.info(
            "Unloaded LoRA adapter",
            extra=log_fields(
                adapter=name, digest=digest[:DIGEST_CHARS], ms=seconds * _MS, bytes=size_bytes
            ),
        )

    # -- the engine's thread -----------------------------------------------------------------------

    def known(self, digest: str, name: str, size_bytes: int) -> None:
        """Note what a version is called from now on."""
        self._versions[digest] = _Version(name, size_bytes)
        self._since_s.setdefault((digest, "host"), self._clock())

    def retired(self, digest: str) -> None:
        """Forget a version."""
        self._versions.pop(digest, None)
        for tier in ("host", "device"):
            self._since_s.pop((digest, tier), None)

    def read_again(self, digest: str, *, seconds: float, error: Exception | None = None) -> None:
        """Note that a version that had left host memory was read from the disk, or could not be."""
        version = self._version(digest)
        fields = self._fields(digest, version, seconds)
        if error is None:
            _log.info("Read LoRA adapter again", extra=log_fields(**fields))
            self._since_s[digest, "host"] = self._clock()
        else:
            _log.error(
                "Could not read LoRA adapter again", extra=log_fields(**fields, reason=str(error))
            )
        self._note_load(_DISK, version.name, digest, version.size_bytes, seconds, error=error)

    def written(self, slot: WrittenSlot) -> None:
        """Note that a version was written into a slot, or could not be."""
        version = self._version(slot.key)
        fields = self._fields(slot.key, version, slot.seconds) | {"slot": slot.slot}
        if slot.error is None:
            _log.info("Placed LoRA adapter in a slot", extra=log_fields(**fields))
            self._since_s[slot.key, "device"] = self._clock()
        else:
            _log.error(
                "Could not place LoRA adapter in a slot",
                extra=log_fields(**fields, reason=str(slot.error)),
            )
        self._note_load(
            _SLOT, version.name, slot.key, version.size_bytes, slot.seconds, error=slot.error
        )

    def evicted(self, key: str, tier: Tier) -> None:
        """Note that a version made room for another; `ms` says how long it had been there."""
        version = self._version(key)
        since_s = self._since_s.pop((key, tier.value), None)
        seconds = 0.0 if since_s is None else self._clock() - since_s
        _log.info(
            "Evicted LoRA adapter",
            extra=log_fields(**self._fields(key, version, seconds), tier=tier.value),
        )
        if tier.value == "device":
            self._metrics.thrash.evicted()

    def admitted(self, digests: Collection[str]) -> Thrash | None:
        """Note that a request got slots; tell when slots have just turned out to be too few."""
        return self._metrics.thrash.admitted(digests) if digests else None

    def waited_for_slot(self, seconds: float) -> None:
        """Note what a request has waited for room in the slots, or for the copy into one."""
        self._metrics.slot_wait.observe(seconds)

    def warn_of_thrash(
        self, thrash: Thrash, *, num_slots: int, slot_bytes: int, host_capacity: int
    ) -> None:
        """Say that slots are too few, and how many would do."""
        wanted = max(thrash.num_adapters, num_slots + 1)
        remedy = f"--max-loras {wanted}"
        if wanted > host_capacity:
            remedy += f" --max-cpu-loras {wanted}"
        cost = (wanted - num_slots) * slot_bytes / _MIB
        _log.warning(
            "Adapters evict each other: %d evictions from %d slots for %d requests of %d adapters "
            "in %g s; start with %s (%.1f MiB more), or send each replica fewer adapters",
            thrash.num_evictions,
            num_slots,
            thrash.num_admitted,
            thrash.num_adapters,
            thrash.window_s,
            remedy,
            cost,
            extra=log_fields(wanted_slots=wanted),
        )

    def _version(self, digest: str) -> _Version:
        return self._versions.get(digest, _Version("?", 0))

    def _fields(self, digest: str, version: _Version, seconds: float) -> dict[str, object]:
        return {
            "adapter": version.name,
            "digest": digest[:DIGEST_CHARS],
            "ms": seconds * _MS,
            "bytes": version.size_bytes,
        }

    def _note_load(
        self,
        stage: str,
        name: str,
        digest: str | None,
        size_bytes: int | None,
        seconds: float,
        *,
        error: Exception | None = None,
    ) -> None:
        if error is None:
            self._metrics.adapter_load.labels(stage).observe(seconds)
        if self._traces is not None:
            self._traces.record_load(
                TracedLoad(
                    stage=stage,
                    name=name,
                    digest=digest,
                    size_bytes=size_bytes,
                    seconds=seconds,
                    error=error,
                    exchange=current_exchange.get(),
                )
            )
