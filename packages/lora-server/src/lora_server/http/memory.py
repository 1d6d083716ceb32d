"""The route that tells what the running server takes of the memory."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from lora_server.errors import NotReadyError
from lora_server.http.auth import OverviewRoute
from lora_server.http.prepare import service_of
from lora_server.ledger import AdapterLedger

router = APIRouter(route_class=OverviewRoute)


@router.get("/v1/memory")
async def get_memory(request: Request) -> dict[str, Any]:
    """Return the memory ledger, measured now, in the form of `lora-server plan --json`."""
    service = service_of(request)
    meter = service.memory
    if meter is None:
        raise NotReadyError("this server has no memory ledger")
    adapters = [
        AdapterLedger(name=card.name, rank=card.rank, size_bytes=card.size_bytes)
        for card in await service.catalog.cards()
    ]
    # The engine answers between two steps; waiting for that must not hold up the streams.
    ledger = await asyncio.to_thread(meter.measure, adapters)
    return ledger.as_json()
