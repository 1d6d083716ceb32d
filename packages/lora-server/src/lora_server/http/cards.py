"""The card of a model: its entry in `/v1/models`, and the answer of the management routes."""

from __future__ import annotations

from typing import Any, Final

from lora_server.http.service import AdapterCard, Service

_OWNER: Final = "lora-server"


def adapter_card(card: AdapterCard, service: Service) -> dict[str, Any]:
    """Return an adapter's card."""
    return {
        "id": card.name,
        "object": "model",
        "created": int(card.created_s),
        "owned_by": _OWNER,
        "root": card.path,
        "parent": card.parent,
        "max_model_len": service.max_model_len,
        "lora": {
            "digest": card.digest,
            "rank": card.rank,
            "residency": card.residency,
            "pinned": card.pinned,
            "bytes": card.size_bytes,
            "hits": card.hits,
            "waiting": card.waiting,
            "running": card.running,
            "effect": None if card.effect is None else card.effect.as_json(),
        },
    }


def base_card(name: str, service: Service) -> dict[str, Any]:
    """Return the card of the base model under one of its names."""
    return {
        "id": name,
        "object": "model",
        "created": int(service.created_s),
        "owned_by": _OWNER,
        "root": service.model_path,
        "parent": None,
        "max_model_len": service.max_model_len,
    }


def card_list(cards: list[dict[str, Any]]) -> dict[str, Any]:
    """Return cards as a list object."""
    return {"object": "list", "data": cards}
