"""What the routes tell of a request when traces are wanted; without them, nothing is made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lora_server.exchange import current_exchange
from lora_server.http.select import Selection
from lora_server.http.service import Service
from lora_server.metrics import BASE_LABEL, RequestRecord
from lora_server.traces import TracedRequest


def on_end(
    service: Service, selection: Selection, *, operation: str, response_id: str
) -> Callable[[RequestRecord], None] | None:
    """Return what makes the span of a request once it has ended; None where nobody wants it.

    Args:
        service: the service.
        selection: what answers.
        operation: the GenAI conventions' word for the kind of request.
        response_id: the reply's id.
    """
    if service.traces is None:
        return None
    adapter = selection.metrics_label
    request = TracedRequest(
        operation=operation,
        model=selection.model,
        base=service.catalog.base_names[0],
        adapter_name=None if adapter == BASE_LABEL else adapter,
        adapter_digests=tuple(use.digest for use in selection.adapters),
        response_id=response_id,
        exchange=current_exchange.get(),
    )
    return partial(service.traces.record_request, request)
