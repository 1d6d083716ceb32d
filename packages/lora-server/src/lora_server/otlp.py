"""Traces through the OpenTelemetry SDK to a collector that speaks OTLP over HTTP.

Needs the extra `otel`. Attributes follow the GenAI semantic conventions; where those have none for
a time, the names are vLLM's. Prompts and answers are in no span.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opentelemetry.context import Context
    from opentelemetry.util.types import AttributeValue

    from lora_server.exchange import Exchange
    from lora_server.metrics import RequestRecord
    from lora_server.traces import TracedLoad, TracedRequest

_NAME: Final = "lora-server"
_SIGNAL_PATH: Final = "/v1/traces"
_EXPORT_TIMEOUT_S: Final = 3.0
_CLOSE_TIMEOUT_S: Final = 5.0
_NS: Final = 1_000_000_000


class OtlpTraces:
    """Makes spans of what is over and sends them in batches, on a thread of the SDK's."""

    def __init__(
        self, endpoint: str, *, version: str, now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        """Send to a collector; nothing is sent before the first span.

        Args:
            endpoint: its address; without a path, that of OTLP is added.
            version: of this package.
            now_ns: nanoseconds since 1970.
        """
        self._now_ns = now_ns
        exporter = OTLPSpanExporter(endpoint=full_endpoint(endpoint), timeout=_EXPORT_TIMEOUT_S)
        # `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` are read by the SDK and go first.
        named = Resource({SERVICE_NAME: _NAME, SERVICE_VERSION: version})
        given = Resource.create()
        is_named = not str(given.attributes[SERVICE_NAME]).startswith("unknown_service")
        resource = named.merge(given) if is_named else given.merge(named)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(_NAME, version)
        self._propagator = TraceContextTextMapPropagator()

    def record_request(self, request: TracedRequest, record: RequestRecord) -> None:
        """Make the span of a request that has just ended."""
        attributes = _request_attributes(request) | _record_attributes(record)
        self._add_span(
            f"{request.operation} {request.model}",
            attributes,
            exchange=request.exchange,
            seconds=record.duration_s,
            error=record.error,
            kind=SpanKind.SERVER,
        )

    def record_load(self, load: TracedLoad) -> None:
        """Make the span of a load that has just ended."""
        attributes: dict[str, AttributeValue] = {
            "lora.load.stage": load.stage,
            "lora.adapter.name": load.name,
        }
        if load.digest is not None:
            attributes["lora.adapter.digest"] = load.digest
        if load.size_bytes is not None:
            attributes["lora.adapter.bytes"] = load.size_bytes
        self._add_span(
            f"load_adapter {load.name}",
            attributes,
            exchange=load.exchange,
            seconds=load.seconds,
            error=load.error,
            kind=SpanKind.INTERNAL,
        )

    def close(self) -> None:
        """Send what is left; a collector that does not answer holds nobody up for long."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)

    def _add_span(
        self,
        name: str,
        attributes: Mapping[str, AttributeValue],
        *,
        exchange: Exchange | None,
        seconds: float,
        error: BaseException | None,
        kind: SpanKind,
    ) -> None:
        end_ns = self._now_ns()
        span = self._tracer.start_span(
            name,
            context=self._parent(exchange),
            kind=kind,
            attributes=attributes,
            start_time=end_ns - int(seconds * _NS),
        )
        if exchange is not None:
            span.set_attribute("gen_ai.request.id", exchange.request_id)
        if error is not None:
            # the text may quote the request: the kind is enough
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=end_ns)

    def _parent(self, exchange: Exchange | None) -> Context | None:
        if exchange is None or exchange.traceparent is None:
            return None
        carrier = {"traceparent": exchange.traceparent}
        if exchange.tracestate is not None:
            carrier["tracestate"] = exchange.tracestate
        return self._propagator.extract(carrier)


def full_endpoint(endpoint: str) -> str:
    """Return the address with OTLP's path where it has none."""
    has_path = urlsplit(endpoint).path.strip("/") != ""
    return endpoint if has_path else endpoint.rstrip("/") + _SIGNAL_PATH


def _request_attributes(request: TracedRequest) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": _NAME,
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.response.id": request.response_id,
        "lora.base.name": request.base,
    }
    if request.adapter_name is not None:
        attributes["lora.adapter.name"] = request.adapter_name
    if len(request.adapter_digests) == 1:
        attributes["lora.adapter.digest"] = request.adapter_digests[0]
    elif request.adapter_digests:
        attributes["lora.adapter.digests"] = request.adapter_digests
    return attributes


def _record_attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "gen_ai.latency.e2e": record.duration_s,
        "lora.request.outcome": record.outcome.value,
    }
    times = {
        "gen_ai.latency.time_in_queue": record.queue_s,
        "gen_ai.latency.time_to_first_token": record.first_token_s,
        "gen_ai.response.time_to_first_chunk": record.first_token_s,
    }
    return attributes | {name: value for name, value in times.items() if value is not None}
