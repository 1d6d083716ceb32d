"""A wish for a slot that is no request: what a pin has to wait for.

It waits as requests do, with the same bound, and does its work once its adapter is in a slot.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from lora_cache import Lease


class SlotClaim:
    """One adapter that must be in a slot for a moment. Owned by the engine thread."""

    __slots__ = ("_action", "adapter_digests", "lease", "outcome", "runnable_since_s")

    def __init__(self, digest: str, action: Callable[[], None]) -> None:
        """Wait for a slot for `digest`, then call `action` while it is held there."""
        self._action = action
        self.adapter_digests = frozenset((digest,))
        self.lease: Lease[str] | None = None
        """The slot; not ready while the adapter is being written."""
        self.runnable_since_s: float | None = None
        """When the adapter was first in the host tier while this waited; None before."""
        self.outcome: Future[None] = Future()
        """Ends when the action has been done, with what it raised, or with why it never will be."""

    @property
    def is_ready(self) -> bool:
        """Whether the adapter is in its slot."""
        return self.lease is not None and self.lease.is_ready

    def settle(self) -> None:
        """Do what the slot was wanted for, and let go of it."""
        try:
            if self.outcome.set_running_or_notify_cancel():
                self._act()
        finally:
            self._let_go()

    def fail(self, error: Exception) -> None:
        """Give up."""
        self._let_go()
        if self.outcome.set_running_or_notify_cancel():
            self.outcome.set_exception(error)

    def _act(self) -> None:
        try:
            self._action()
        except Exception as error:  # noqa: BLE001 - it is for whoever asked
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(None)

    def _let_go(self) -> None:
        if self.lease is not None:
            self.lease.release()
            self.lease = None
