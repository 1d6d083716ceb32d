"""Routes that this server's task has no answer for: they say so, instead of not being there."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response

from lora_server.errors import InvalidRequestError
from lora_server.http.auth import UserRoute
from lora_server.http.prepare import service_of

_GENERATING: Final = ("/v1/chat/completions", "/v1/completions")
_POOLING: Final = (
    "/v1/embeddings",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/pooling",
)

generating_router = APIRouter(route_class=UserRoute)
pooling_router = APIRouter(route_class=UserRoute)


async def refuse_generation(request: Request) -> Response:
    """Refuse to generate with a model that was loaded without its output layer."""
    pooling = service_of(request).pooling
    task = "" if pooling is None else f" --task {pooling.task}"
    raise InvalidRequestError(f"the server runs{task}, which generates no text")


async def refuse_pooling(request: Request) -> Response:
    """Refuse to pool with a model that was loaded to generate."""
    raise InvalidRequestError(
        f"{request.url.path}: the server runs --task generate; start it with --task embed, "
        "classify, token_classify or score"
    )


for _path in _GENERATING:
    generating_router.add_api_route(
        _path, refuse_generation, methods=["POST"], include_in_schema=False
    )
for _path in _POOLING:
    pooling_router.add_api_route(_path, refuse_pooling, methods=["POST"], include_in_schema=False)
