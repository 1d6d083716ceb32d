"""One text while the pooling engine works on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .pooling_request import PoolingKind

if TYPE_CHECKING:
    from lora_cache import Lease

    from .pooling_request import PoolingRequest


class PoolingSequence:
    """A request and the lease of its adapters. Owned by the engine thread."""

    __slots__ = ("adapter_digests", "arrival", "blocked_since_s", "lease", "request")

    def __init__(self, request: PoolingRequest, arrival: int) -> None:
        self.request = request
        self.arrival = arrival
        """Position in the order of arrival."""
        self.adapter_digests = frozenset(use.digest for use in request.adapters)
        self.blocked_since_s: float | None = None
        """When it was first found to lack nothing but slots, or the copy into one; None before."""
        self.lease: Lease[str] | None = None
        """The slots of its adapters; not ready while one of them is being written."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return len(self.request.token_ids)

    @property
    def wants_logits(self) -> bool:
        """Whether its rows go through the head."""
        return self.request.kind is PoolingKind.LOGITS

    @property
    def is_ready(self) -> bool:
        """Whether all its adapters are in their slots; true for the base."""
        return not self.adapter_digests or (self.lease is not None and self.lease.is_ready)
