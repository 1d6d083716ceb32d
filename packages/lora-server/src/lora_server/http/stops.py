"""Stop strings, also where they lie across the borders of tokens. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Matched(NamedTuple):
    """What is certain after a piece of text."""

    text: str
    """Text to hand on; it ends before the stop string, if there is one."""
    stop: str | None = None
    """The stop string that ends the sequence."""


class StopMatcher:
    """Hands text on, except what may still become a stop string.

    The stop string that is complete first wins, and of several that end together the longest, so
    that the result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Matched:
        """Add text and return what is certain now; add nothing after a stop string."""
        if not self._stops:
            return Matched(text)
        self._held += text
        if (hit := self._find()) is not None:
            return hit
        num_held = self._longest_beginning()
        certain = self._held[: len(self._held) - num_held]
        self._held = self._held[len(certain) :]
        return Matched(certain)

    def flush(self) -> str:
        """Return what was held back: the sequence ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self) -> Matched | None:
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if not ends:
            return None
        _, start, stop = min(ends)
        return Matched(self._held[:start], stop)

    def _longest_beginning(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        for length in range(min(len(self._held), max(map(len, self._stops)) - 1), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
