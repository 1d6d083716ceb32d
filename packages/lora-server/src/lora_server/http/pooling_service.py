"""What the pooling routes need of the rest of the service, as Protocols and values.

Knows nothing of models, devices or files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lora_server.config import Task
from lora_server.engine.pooling_request import PoolingOutput, PoolingRequest
from lora_server.engine.request import AdapterUse
from lora_server.http.pooling_text import PoolingText
from lora_server.model.labels import AdapterLabels, LabelSet, build_labels
from lora_server.model.pooling_model import HeadInfo, HeadRows


class PoolingEngine(Protocol):
    """The engine, seen from the event loop's thread."""

    async def pool(self, request: PoolingRequest) -> PoolingOutput:
        """Answer one request; cancelling the task that awaits it ends the request."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingService:
    """A model that classifies, scores and embeds."""

    engine: PoolingEngine
    task: Task
    text: PoolingText
    head: HeadInfo | None
    """The base's classification head; None for a model without one."""
    embedding_length: int
    """Numbers of an embedding."""
    labels_of: Callable[[str], AdapterLabels | None]
    """What the version with a digest brings of a head."""

    @property
    def is_per_token(self) -> bool:
        """Whether the head answers for each token."""
        return self.head is not None and self.head.rows is HeadRows.ALL

    def labels(self, adapters: Sequence[AdapterUse]) -> LabelSet | None:
        """Return the labels of what answers: the adapter's where it says so, else the base's.

        Args:
            adapters: what was chosen; empty for the base.

        Returns:
            None when neither the adapter nor the checkpoint has a head.
        """
        if self.head is None:
            return None
        own = [self.labels_of(use.digest) for use in adapters]
        found = next((o for o in own if o is not None and o.num_labels is not None), None)
        notes = [o.notes for o in own if o is not None]
        if found is not None and found.num_labels is not None:
            return build_labels(found.num_labels, *notes, self.head.notes)
        if not self.head.is_trained:
            return None
        return build_labels(len(self.head.labels), *notes, self.head.notes)
