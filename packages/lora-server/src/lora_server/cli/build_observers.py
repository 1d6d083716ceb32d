"""What watches the service: metrics, traces where they are wanted, and the adapters' journal."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from lora_server.engine.journal import AdapterJournal
from lora_server.errors import StartupError
from lora_server.metrics import ServerMetrics, ThrashAlarm

if TYPE_CHECKING:
    from lora_server.config import ServerConfig
    from lora_server.traces import Traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Observers:
    """Everything that is told what happens."""

    metrics: ServerMetrics
    traces: Traces | None
    journal: AdapterJournal


def build_observers(config: ServerConfig) -> Observers:
    """Make them; nothing is sent before there is something to tell.

    Raises:
        StartupError: traces are wanted and the packages for them are not there.
    """
    metrics = ServerMetrics(
        max_adapter_labels=config.metrics_max_adapters, thrash=ThrashAlarm(config.thrash_window)
    )
    traces = None
    if config.otlp_traces_endpoint is not None:
        traces = _connect(config.otlp_traces_endpoint)
    return Observers(metrics=metrics, traces=traces, journal=AdapterJournal(metrics, traces))


def _connect(endpoint: str) -> Traces:
    try:
        from lora_server.otlp import OtlpTraces
    except ModuleNotFoundError as error:
        problem = (
            f"--otlp-traces-endpoint needs the extra otel, and {error.name} is not installed: "
            "pip install 'lora-server[otel]'"
        )
        raise StartupError([problem]) from error
    return OtlpTraces(endpoint, version=version("lora-server"))
