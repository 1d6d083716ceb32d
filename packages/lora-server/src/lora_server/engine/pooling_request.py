"""What the pooling engine is asked to do, and what it answers: one text, once through the model.

Knows nothing of HTTP, text or adapter names; adapters are digests here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from .request import AdapterUse


class PoolingKind(StrEnum):
    """What is wanted of a text."""

    EMBED = "embed"
    """Its embedding."""
    LOGITS = "logits"
    """What the classification head says of it, or of each of its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequest:
    """One text, or a pair of texts."""

    request_id: str
    """Unique among the requests in flight."""
    token_ids: tuple[int, ...]
    """At least one token, checked against the model's limit by the caller."""
    type_ids: tuple[int, ...]
    """One a token: 1 in the second text of a pair, where the model tells texts apart."""
    kind: PoolingKind
    adapters: tuple[AdapterUse, ...] = ()
    """Empty: the base model alone."""

    n: int = 1
    """Answers; always one."""
    exchange_id: str | None = None
    """Names the HTTP request in log lines; not unique."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOutput:
    """The answer to one request."""

    request_id: str
    values: np.ndarray
    """float32: the embedding `[H]`, or logits `[N, labels]` of the request's own head: one row, or
    one a token."""
    admitted_s: float
    """When its step began, on the engine's clock."""
