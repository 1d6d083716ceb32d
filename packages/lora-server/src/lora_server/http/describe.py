"""What the API's description says of every route: its errors, its keys, and its streams.

Knows no route; each adds what it answers when all goes well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from pydantic import BaseModel

from lora_server.http.keys import Access
from lora_server.http.schemas.replies import ErrorReply

_BEARER: Final = "ApiKey"

Responses = dict[int | str, dict[str, Any]]
"""Status -> what FastAPI is told of it."""

_SERVER: Final[Mapping[int | str, str]] = {
    500: "The server failed on this request.",
    503: "The server is starting or draining.",
}
_KEYED: Final[Mapping[int | str, str]] = {
    401: "There is no key, or one that does not open this route.",
    429: "The key has used up its requests or its tokens; `Retry-After` says for how long.",
}
_CHECKED: Final[Mapping[int | str, str]] = {
    400: "The request has a mistake; `details` has all of them.",
    404: "A name stands for nothing that is served.",
    # Also keeps FastAPI from adding a 422 of another shape.
    "4XX": "The request is refused for another reason, in the same shape.",
}
_WITH_BODY: Final[Mapping[int | str, str]] = {
    408: "The body did not arrive in time.",
    413: "The body is too large.",
}
_MANAGING: Final[Mapping[int | str, str]] = {
    403: "The path, or the name, is not allowed, or nothing may be loaded.",
    409: "The name stands for another version than expected, or the new one failed its gate.",
}


_EVENT: Final[Mapping[str, Any]] = {
    "type": "object",
    "description": "One event with `stream: true`; the last one's data is `[DONE]`.",
    "properties": {"data": {"type": "string", "description": "A chunk of the reply in JSON."}},
    "required": ["data"],
}


def error_responses(access: Access, methods: set[str]) -> Responses:
    """Return the errors of a route, by its level and its methods."""
    told = {**_SERVER, **_CHECKED}
    if access is not Access.OPEN:
        told |= _KEYED
    if "POST" in methods:
        told |= _WITH_BODY
    if access is Access.ADMIN:
        told |= _MANAGING
    return {code: {"model": ErrorReply, "description": text} for code, text in told.items()}


def security_of(access: Access) -> dict[str, Any]:
    """Return what a route's description says of keys."""
    return {} if access is Access.OPEN else {"security": [{_BEARER: []}]}


def answers(reply: type[BaseModel]) -> dict[str, Any]:
    """Return the arguments of a route that answers with `reply`, which is only described.

    Replies are written by hand, so that none is checked or copied on its way out.
    """
    return {"response_model": None, "responses": {200: {"model": reply}}}


def streams(reply: type[BaseModel]) -> dict[str, Any]:
    """Return the arguments of a route that answers with `reply`, or with its chunks as events."""
    described = {"model": reply, "content": {"text/event-stream": {"schema": _EVENT}}}
    return {"response_model": None, "responses": {200: described}}


def texts(media_type: str) -> dict[str, Any]:
    """Return the arguments of a route that answers with text of another kind than JSON."""
    return {
        "response_model": None,
        "responses": {200: {"content": {media_type: {"schema": {"type": "string"}}}}},
    }


def description_of(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an application whose routes are described by this module."""
    schema: dict[str, Any] = app.openapi()
    scheme = {"type": "http", "scheme": "bearer", "description": "One of the server's keys."}
    schema.setdefault("components", {})["securitySchemes"] = {_BEARER: scheme}
    return schema
