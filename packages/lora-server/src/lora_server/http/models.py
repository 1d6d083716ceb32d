"""`GET /v1/models`: the base model first, then every adapter that is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from lora_server.errors import ModelNotFoundError, UnknownAdapterError
from lora_server.http.auth import UserRoute
from lora_server.http.cards import adapter_card, base_card, card_list
from lora_server.http.describe import answers
from lora_server.http.prepare import service_of
from lora_server.http.schemas import replies

router = APIRouter(route_class=UserRoute)


@router.get("/v1/models", **answers(replies.ModelList))
async def list_models(request: Request) -> dict[str, Any]:
    """List everything that `model` may name."""
    service = service_of(request)
    names = filter(service.catalog.is_base, service.catalog.base_names)
    bases = [base_card(name, service) for name in names]
    adapters = [adapter_card(card, service) for card in await service.catalog.cards()]
    return card_list(bases + adapters)


@router.get("/v1/models/{name:path}", **answers(replies.ModelCard))
async def get_model(name: str, request: Request) -> dict[str, Any]:
    """Describe one model."""
    service = service_of(request)
    if service.catalog.is_base(name):
        return base_card(name, service)
    entry = service.catalog.resolve(name)
    try:
        return adapter_card(await service.catalog.card(entry.name), service)
    except UnknownAdapterError:
        # Unloaded between the two calls.
        raise ModelNotFoundError(name, service.catalog.names) from None
