"""How much each adapter is asked for. Counts sequences by version; knows neither names nor text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .scheduler import AdapterUser


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUsage:
    """One adapter at one moment. A request for n answers counts n times, as in the metrics."""

    hits: int = 0
    """Times it was needed and was in its slot already; grows from its load."""
    waiting: int = 0
    """Sequences with it that wait to be admitted."""
    running: int = 0
    """Sequences with it that are being generated."""


def count_usage(
    hits: Mapping[str, int],
    *,
    waiting: Iterable[AdapterUser],
    running: Iterable[AdapterUser] = (),
) -> dict[str, AdapterUsage]:
    """Count by adapter; a sequence with a weighted set counts for each member.

    Args:
        hits: by digest.
        waiting: everybody who waits.
        running: everybody who runs.

    Returns:
        By digest; an adapter that nobody asked for is absent.
    """
    num_waiting = Counter(digest for user in waiting for digest in user.adapter_digests)
    num_running = Counter(digest for user in running for digest in user.adapter_digests)
    return {
        digest: AdapterUsage(
            hits=hits.get(digest, 0), waiting=num_waiting[digest], running=num_running[digest]
        )
        for digest in {*hits, *num_waiting, *num_running}
    }
