"""What is traced: requests, and loads of adapters. Who exports it is chosen at start.

Everything is told once it is over, so that tracing costs a request nothing while it runs. Knows no
tracing library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lora_server.exchange import Exchange
    from lora_server.metrics import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """What is known of a request when it begins."""

    operation: str
    """Of the GenAI semantic conventions: `chat`, `text_completion`, `embeddings`; or the route's
    own word."""
    model: str
    """The name that was asked for."""
    base: str
    """Name of the base model."""
    adapter_name: str | None
    """None for the base alone."""
    adapter_digests: tuple[str, ...]
    """Several for a weighted set."""
    response_id: str
    exchange: Exchange | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLoad:
    """One adapter that was read from the disk, or written into a slot."""

    stage: str
    """`disk` or `slot`."""
    name: str
    digest: str | None
    """None when it could not be read."""
    size_bytes: int | None
    seconds: float
    error: Exception | None
    exchange: Exchange | None


class Traces(Protocol):
    """Takes what is over. Any thread may call it; no method blocks."""

    def record_request(self, request: TracedRequest, record: RequestRecord) -> None:
        """Take a request that has just ended."""
        ...

    def record_load(self, load: TracedLoad) -> None:
        """Take a load that has just ended."""
        ...

    def close(self) -> None:
        """Send what is left, for a few seconds at most. Called once, last."""
        ...
