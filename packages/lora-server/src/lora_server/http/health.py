"""The probe, which carries no key, what scrapers read, and the API's own description."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from lora_server.errors import NotReadyError
from lora_server.http.auth import OpenRoute, OverviewRoute, UserRoute
from lora_server.http.describe import answers, description_of, texts
from lora_server.http.prepare import service_of
from lora_server.http.schemas import replies
from lora_server.metrics import ScrapeState

open_router = APIRouter(route_class=OpenRoute)
user_router = APIRouter(route_class=UserRoute)
overview_router = APIRouter(route_class=OverviewRoute)


@open_router.get("/health", **answers(replies.StatusReply))
async def get_health(request: Request, *, live: bool = False) -> dict[str, str]:
    """Answer 200 while requests are taken, else 503.

    With `live` answer 200 as long as the process can serve at all, also while it starts or drains:
    a supervisor that starts it anew then would only make things worse.
    """
    service = service_of(request)
    if not service.is_alive():
        raise NotReadyError("the engine has stopped: only a new start helps")
    if not live:
        service.readiness.check()
    return {"status": service.readiness.phase.value}


@user_router.get("/version", **answers(replies.VersionReply))
async def get_version(request: Request) -> dict[str, str]:
    """Return the server's version."""
    return {"version": service_of(request).version}


@overview_router.get("/metrics", **texts("text/plain"))
async def get_metrics(request: Request) -> Response:
    """Return all metrics in Prometheus' text format."""
    service = service_of(request)
    # The engine answers between two steps; waiting for that must not hold up the streams.
    engine = await asyncio.to_thread(service.engine.snapshot)
    state = ScrapeState(engine=engine, adapters=await service.catalog.cards(), now_s=service.now())
    # Thousands of series take tens of milliseconds to write.
    text = await asyncio.to_thread(service.metrics.render, state)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@user_router.get("/openapi.json", include_in_schema=False)
async def get_openapi(request: Request) -> dict[str, Any]:
    """Return the description of all routes."""
    return description_of(request.app)
