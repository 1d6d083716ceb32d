"""Routes that load, unload, pin and describe adapters while the server runs."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from lora_server.errors import ModelNotFoundError
from lora_server.http.auth import AdminRoute, UserRoute, audit_of
from lora_server.http.cards import adapter_card, card_list
from lora_server.http.context import context_of
from lora_server.http.describe import answers
from lora_server.http.gate import gate_of
from lora_server.http.prepare import service_of
from lora_server.http.schemas import replies
from lora_server.http.schemas.adapters import LoadBody, UnloadBody
from lora_server.http.service import Service

admin_router = APIRouter(route_class=AdminRoute)
user_router = APIRouter(route_class=UserRoute)


@admin_router.post("/v1/load_lora_adapter", **answers(replies.AdapterCard))
async def load_adapter(body: LoadBody, request: Request) -> dict[str, Any]:
    """Load an adapter, or replace it in place; once this answers, it serves the next request."""
    service = service_of(request)
    record = audit_of(request)
    record.name, record.path = body.lora_name, body.lora_path
    record.before = _digest_of(service, body.lora_name)
    context_of(request).held.enter_context(service.readiness.working())
    gate = await gate_of(service, body)
    card = await service.catalog.load(
        name=body.lora_name,
        path=body.lora_path,
        load_inplace=bool(body.load_inplace),
        pinned=bool(body.pinned),
        expected_digest=body.expected_digest,
        check=gate,
    )
    record.after = card.digest
    answer = adapter_card(card, service)
    if gate is not None and gate.result is not None:
        answer["gate"] = gate.result.as_dict()
    return answer


@admin_router.post("/v1/unload_lora_adapter", **answers(replies.DeletedReply))
async def unload_adapter(body: UnloadBody, request: Request) -> dict[str, Any]:
    """Forget an adapter: new requests get 404 at once, running ones finish."""
    service = service_of(request)
    record = audit_of(request)
    record.name, record.before = body.lora_name, _digest_of(service, body.lora_name)
    await service.catalog.unload(body.lora_name)
    return {"id": body.lora_name, "object": "model", "deleted": True}


@admin_router.post("/v1/adapters/{name:path}/pin", **answers(replies.AdapterCard))
async def pin_adapter(name: str, request: Request) -> dict[str, Any]:
    """Keep an adapter in its slot."""
    service = service_of(request)
    record = audit_of(request)
    record.name, record.before = name, _digest_of(service, name)
    card = await service.catalog.pin(name)
    record.after = card.digest
    return adapter_card(card, service)


@admin_router.post("/v1/adapters/{name:path}/unpin", **answers(replies.AdapterCard))
async def unpin_adapter(name: str, request: Request) -> dict[str, Any]:
    """Let an adapter be evicted again."""
    service = service_of(request)
    record = audit_of(request)
    record.name, record.before = name, _digest_of(service, name)
    card = await service.catalog.unpin(name)
    record.after = card.digest
    return adapter_card(card, service)


@user_router.get("/v1/adapters", **answers(replies.AdapterList))
async def list_adapters(request: Request) -> dict[str, Any]:
    """List the cards of all adapters."""
    service = service_of(request)
    return card_list([adapter_card(card, service) for card in await service.catalog.cards()])


@user_router.get("/v1/adapters/{name:path}", **answers(replies.AdapterCard))
async def get_adapter(name: str, request: Request) -> dict[str, Any]:
    """Describe one adapter."""
    service = service_of(request)
    return adapter_card(await service.catalog.card(name), service)


def _digest_of(service: Service, name: str) -> str | None:
    """Return the version that a name stands for now; None where there is none."""
    try:
        return service.catalog.resolve(name).digest
    except ModelNotFoundError:
        return None
