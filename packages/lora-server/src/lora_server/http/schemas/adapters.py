"""Bodies of the routes that manage adapters."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from lora_server.http.schemas.strict import StrictBody

Name = Annotated[str, Field(min_length=1)]


class LoadBody(StrictBody):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: Name
    lora_path: Name
    load_inplace: bool | None = None
    pinned: bool | None = None
    expected_digest: Name | None = None
    gate: bool | dict[str, Any] | None = None
    """A baseline that the new version must pass first, or whether the server's own one counts."""
    is_3d_lora_weight: bool | None = None
    """Accepted for vLLM's clients; the form is read from the tensors."""


class UnloadBody(StrictBody):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: Name
