"""Stop strings, also where they lie across the borders of tokens. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopHit:
    """A stop string was completed."""

    text: str
    """The text before the stop string that was not handed out yet."""
    stop: str
    """The stop string."""


class StopMatcher:
    """Hands text on, except what may still become a stop string.

    The stop string that is complete first wins, and of several that end together the longest, so
    that the result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> str | StopHit:
        """Add text. Return what is certain to stay, or the hit that ends the sequence."""
        if not self._stops:
            return text
        self._held += text
        hit = self._find()
        if hit is not None:
            return hit
        num_held = self._longest_beginning()
        certain = self._held[: len(self._held) - num_held]
        self._held = self._held[len(certain) :]
        return certain

    def flush(self) -> str:
        """Return what was held back: the sequence ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self) -> StopHit | None:
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if not ends:
            return None
        _, start, stop = min(ends)
        return StopHit(text=self._held[:start], stop=stop)

    def _longest_beginning(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        for length in range(min(len(self._held), max(map(len, self._stops)) - 1), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
