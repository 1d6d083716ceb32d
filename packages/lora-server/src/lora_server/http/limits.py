"""How much one key may ask for in a minute: requests, and tokens read and written.

A bucket is refilled evenly and holds one minute's allowance, so that a burst is possible after a
pause. Knows nothing of HTTP or of what the tokens are for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lora_server.errors import RateLimitError

_MINUTE_S: Final = 60.0

Clock = Callable[[], float]
"""Seconds from any start."""


class TokenBucket:
    """An allowance that grows with time up to one minute's worth; it may be overdrawn."""

    def __init__(self, per_minute: int, *, clock: Clock) -> None:
        """Start full.

        Args:
            per_minute: what is added in a minute, and the most there can be.
            clock: tells the time.
        """
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._as_of = clock()

    @property
    def level(self) -> float:
        """What is there now; negative when more was used than there was."""
        now = self._clock()
        self._level = min(self._level + self._gained(now - self._as_of), float(self.per_minute))
        self._as_of = now
        return self._level

    @property
    def full_in_s(self) -> float:
        """Seconds until it is full again."""
        return self._time_for(self.per_minute - self.level)

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` is there; an amount above the most waits for that."""
        return self._time_for(min(amount, self.per_minute) - self.level)

    def take(self, amount: float) -> None:
        """Use an amount, whether it is there or not."""
        self._level = self.level - amount

    def _gained(self, seconds: float) -> float:
        return seconds * self.per_minute / _MINUTE_S

    def _time_for(self, amount: float) -> float:
        return max(amount, 0.0) * _MINUTE_S / self.per_minute


class KeyLimits:
    """The two allowances of one key. Use from the event loop's thread."""

    def __init__(
        self,
        *,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Clock,
    ) -> None:
        """Start with full allowances; None is no limit."""
        self.rates = (requests_per_minute, tokens_per_minute)
        """What it was made for."""
        self._requests = _bucket(requests_per_minute, clock)
        self._tokens = _bucket(tokens_per_minute, clock)

    def take_request(self) -> None:
        """Count one request.

        Raises:
            RateLimitError: it has to wait; nothing is counted.
        """
        _take(self._requests, 1, "requests")

    def take_tokens(self, count: int) -> None:
        """Count the tokens of prompts that are about to be read.

        More than a minute's allowance are read once the allowance is full, and are owed then.

        Raises:
            RateLimitError: they have to wait; nothing is counted.
        """
        _take(self._tokens, count, "tokens")

    def settle(self, count: int) -> None:
        """Count tokens that were generated; what is overdrawn delays the next request."""
        if self._tokens is not None:
            self._tokens.take(count)

    def headers(self) -> list[tuple[str, str]]:
        """Return what a reply tells of the allowances, in the names of the OpenAI API."""
        return [
            (f"x-ratelimit-{field}-{what}", value)
            for what, bucket in (("requests", self._requests), ("tokens", self._tokens))
            if bucket is not None
            for field, value in (
                ("limit", str(bucket.per_minute)),
                ("remaining", str(max(int(bucket.level), 0))),
                ("reset", f"{bucket.full_in_s:.3f}s"),
            )
        ]


def _bucket(per_minute: int | None, clock: Clock) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute, clock=clock)


def _take(bucket: TokenBucket | None, amount: int, what: str) -> None:
    if bucket is None:
        return
    wait_s = bucket.wait_s(amount)
    if wait_s > 0:
        raise RateLimitError(
            f"this key is limited to {bucket.per_minute} {what} per minute: {amount} asked for, "
            f"{max(int(bucket.level), 0)} left; try again in {wait_s:.1f} s",
            what=what,
            retry_after_s=wait_s,
        )
    bucket.take(amount)
