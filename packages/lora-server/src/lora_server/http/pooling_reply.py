"""How the pooling routes write their replies: JSON, and vectors as numbers or as base64."""

from __future__ import annotations

import base64
from typing import Any, Final

import numpy as np
from fastapi import Response

from lora_server.http.prepare import dumps

_LITTLE_ENDIAN: Final = np.dtype("<f4")


def json_reply(body: dict[str, Any]) -> Response:
    """Return a reply of compact JSON."""
    return Response(dumps(body), media_type="application/json")


def write_vector(values: np.ndarray, encoding: str | None) -> list[Any] | str:
    """Return float32 numbers as a list, or as the base64 of their little-endian bytes."""
    if encoding == "base64":
        return base64.b64encode(values.astype(_LITTLE_ENDIAN).tobytes()).decode("ascii")
    numbers: list[Any] = values.tolist()
    return numbers
