"""Prometheus metrics of the service, units in the names, nothing global.

Counters and histograms are fed while requests run; everything that is a state is read at the
scrape. Labels hold names of registered adapters, never a path or a client's text. Knows neither
HTTP nor the engine: both are described by Protocols.
"""

from __future__ import annotations

from lora_server.metrics.labels import BASE_LABEL, OTHER_LABEL, WEIGHTED_LABEL
from lora_server.metrics.protocols import (
    CacheSnapshot,
    EngineSnapshot,
    ScrapeState,
    ServedAdapter,
    TierSnapshot,
)
from lora_server.metrics.server import ServerMetrics
from lora_server.metrics.thrash import Thrash, ThrashAlarm
from lora_server.metrics.timer import Outcome, RequestRecord, RequestTimer

__all__ = [
    "BASE_LABEL",
    "OTHER_LABEL",
    "WEIGHTED_LABEL",
    "CacheSnapshot",
    "EngineSnapshot",
    "Outcome",
    "RequestRecord",
    "RequestTimer",
    "ScrapeState",
    "ServedAdapter",
    "ServerMetrics",
    "Thrash",
    "ThrashAlarm",
    "TierSnapshot",
]
