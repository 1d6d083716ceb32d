"""The only place that knows HTTP statuses and the OpenAI API's error shape."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from lora_server.errors import (
    AdapterAlreadyLoadedError,
    AdapterConflictError,
    AuthenticationError,
    DigestMismatchError,
    EngineError,
    GateFailedError,
    InvalidAdapterRequestError,
    InvalidRequestError,
    ModelNotFoundError,
    NameNotAllowedError,
    NotReadyError,
    PathNotAllowedError,
    RateLimitError,
    RequestError,
    RequestTimeoutError,
    RequestTooLargeError,
    RuntimeLoadingDisabledError,
    ServerError,
    UnknownAdapterError,
)
from lora_server.logs import log_fields

logger = logging.getLogger(__name__)

_STATUSES: Final[Mapping[type[ServerError], int]] = MappingProxyType(
    {
        InvalidRequestError: 400,
        InvalidAdapterRequestError: 400,
        AdapterAlreadyLoadedError: 400,
        AdapterConflictError: 400,
        AuthenticationError: 401,
        PathNotAllowedError: 403,
        NameNotAllowedError: 403,
        RuntimeLoadingDisabledError: 403,
        ModelNotFoundError: 404,
        UnknownAdapterError: 404,
        RequestTimeoutError: 408,
        DigestMismatchError: 409,
        GateFailedError: 409,
        RequestTooLargeError: 413,
        RateLimitError: 429,
        EngineError: 500,
        NotReadyError: 503,
    }
)
_SERVER_CODES: Final[Mapping[int, str]] = MappingProxyType(
    {500: "internal_error", 503: "not_ready"}
)
_RETRY_AFTER_S: Final = 2
"""When to ask again while the server starts or drains: behind a balancer another one answers."""
_CALLERS_FAULT: Final = "invalid_request_error"
_ROUTE_CODES: Final[Mapping[int, str]] = MappingProxyType(
    {404: "unknown_url", 405: "method_not_allowed"}
)


def status_of(error: Exception) -> int:
    """Status that answers an error; 500 for what is not in the table."""
    for kind in type(error).__mro__:
        if issubclass(kind, ServerError) and kind in _STATUSES:
            return _STATUSES[kind]
    return 400 if isinstance(error, RequestError) else 500


def error_body(error: Exception) -> dict[str, Any]:
    """Describe an error in the OpenAI API's shape; an unexpected one tells no inner details."""
    if isinstance(error, RequestError):
        details = error.details
        if isinstance(error, InvalidAdapterRequestError) and not details:
            details = (error.message,)
        kind = error.what if isinstance(error, RateLimitError) else _CALLERS_FAULT
        return _body(error.message, kind=kind, code=error.code, param=error.param, details=details)
    status = status_of(error)
    message = str(error) if isinstance(error, ServerError) else "the server failed on this request"
    return _body(message, kind="server_error", code=_SERVER_CODES.get(status, "internal_error"))


def error_response(error: Exception) -> Response:
    """Answer an error."""
    return _json_response(error_body(error), status_of(error), _headers_of(error))


def _headers_of(error: Exception) -> Mapping[str, str] | None:
    match error:
        case AuthenticationError():
            return {"WWW-Authenticate": "Bearer"}
        case RateLimitError():
            return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        case NotReadyError():
            return {"Retry-After": str(_RETRY_AFTER_S)}
        case RequestTooLargeError() | RequestTimeoutError():
            # What is left of the body must not be taken for the next request.
            return {"Connection": "close"}
    return None


def stream_error(error: Exception, request_id: str) -> str:
    """Render an error for a stream that has already begun, and log it where it is ours."""
    log_failure(error, request_id)
    return json.dumps(error_body(error))


def log_failure(error: Exception, request_id: str) -> None:
    """Log an error that is not the caller's, with its traceback and the request's id."""
    if status_of(error) == 500:  # noqa: PLR2004 - the status itself is the plainest name
        extra = log_fields(request_id=request_id)
        logger.error("request %s failed", request_id, exc_info=error, extra=extra)


def context_length_error(message: str, *, param: str) -> InvalidRequestError:
    """Refuse a request that does not fit the context, with the code that clients look for."""
    error = InvalidRequestError(message, param=param)
    error.code = "context_length_exceeded"
    return error


def install_handlers(app: FastAPI) -> None:
    """Let `app` answer every expected error in the one shape."""
    app.add_exception_handler(ServerError, _on_server_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)


async def _on_server_error(request: Request, error: Exception) -> Response:
    log_failure(error, request.state.context.request_id)
    return error_response(error)


async def _on_validation_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [_problem(item) for item in error.errors()]
    # A union reports one problem for each of its members: the first is told, the rest are details.
    message = "; ".join(dict.fromkeys(text for _, text in problems))
    details = [text for _, text in problems] if len(problems) > 1 else ()
    refusal = InvalidRequestError(message, param=problems[0][0], details=tuple(details))
    return error_response(refusal)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code in _ROUTE_CODES:
        what = "does not exist" if error.status_code == 404 else "has no such method"  # noqa: PLR2004
        message = f"{request.method} {request.url.path}: this route {what}"
    code = _ROUTE_CODES.get(error.status_code, "invalid_request")
    return _json_response(_body(message, code=code), error.status_code, error.headers)


def _json_response(
    body: dict[str, Any], status: int, headers: Mapping[str, str] | None
) -> Response:
    # ASCII only: a message may quote text that is no Unicode, which is often the very mistake.
    return Response(json.dumps(body), status, headers, media_type="application/json")


def _problem(item: Mapping[str, Any]) -> tuple[str | None, str]:
    """Turn one of pydantic's errors into (field, sentence)."""
    kind = item["type"]
    if kind == "json_invalid":
        position = item["loc"][-1]
        return None, f"the body is not valid JSON: {item['ctx']['error']} at character {position}"
    # Parts in angle brackets name the alternative of a union, not a field.
    path = ".".join(part for part in map(str, item["loc"][1:]) if not part.startswith("<"))
    if not path:
        return None, "the body must be a JSON object sent with 'Content-Type: application/json'"
    if kind == "extra_forbidden":
        return path, f"{path}: this server does not support this field or this value of it"
    return path, f"{path}: {item['msg'].removeprefix('Value error, ')}"


def _body(
    message: str,
    *,
    code: str,
    kind: str = _CALLERS_FAULT,
    param: str | None = None,
    details: Sequence[str] = (),
) -> dict[str, Any]:
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    if details:
        error["details"] = list(details)
    return {"error": error}
