"""Puts the routes together around one `Service`."""

from __future__ import annotations

from fastapi import FastAPI

from lora_server.http import (
    adapters,
    chat,
    classify,
    completions,
    embeddings,
    health,
    memory,
    models,
    pooling,
    score,
    unavailable,
)
from lora_server.http.body_limit import BodyLimitMiddleware
from lora_server.http.context import ContextMiddleware
from lora_server.http.errors import install_handlers
from lora_server.http.service import Service
from lora_server.http.ui import build_ui_router


def create_app(service: Service) -> FastAPI:
    """Return the ASGI application; it holds no state besides `service`."""
    app = FastAPI(
        title="lora-server",
        description="One base model and many LoRA adapters behind an OpenAI-compatible API.",
        version=service.version,
        # The framework's own pages would be routes without an access level.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    generating = (chat.router, completions.router, unavailable.pooling_router)
    pooled = (
        embeddings.router,
        classify.router,
        score.router,
        pooling.router,
        unavailable.generating_router,
    )
    for router in (
        *(generating if service.pooling is None else pooled),
        models.router,
        adapters.admin_router,
        adapters.user_router,
        memory.router,
        health.open_router,
        health.user_router,
        build_ui_router(),
        health.overview_router,
    ):
        app.include_router(router)
    install_handlers(app)
    app.add_middleware(BodyLimitMiddleware, limits=service.body_limits)
    app.add_middleware(ContextMiddleware)
    return app
