"""From the options to the keys of the service, and to the limits of what clients send."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_server.http.body_limit import BodyLimits
from lora_server.http.key_file import KeyFile
from lora_server.http.keys import ApiKeys

if TYPE_CHECKING:
    from lora_server.config import ServerConfig


def build_keys(config: ServerConfig) -> ApiKeys:
    """Return the keys of the options and of the file they name.

    Raises:
        StartupError: with every problem of the file.
    """
    keys = ApiKeys(user=config.api_key, admin=config.admin_api_key)
    if config.api_key_file is None:
        return keys
    file = KeyFile(config.api_key_file, taken=keys.fixed)
    return ApiKeys(user=config.api_key, admin=config.admin_api_key, file=file)


def build_body_limits(config: ServerConfig) -> BodyLimits:
    """Return what is taken from a client before its request counts as sent."""
    return BodyLimits(max_bytes=config.max_body_bytes, timeout_s=config.request_body_timeout)
