"""The audit log: one line for each call of a management route, whatever became of it.

Lines go to the logger `lora_server.audit`. They name the key, and never show it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Final

from fastapi import Request

from lora_server.errors import RequestError

AUDIT_LOGGER: Final = "lora_server.audit"
_logger = logging.getLogger(AUDIT_LOGGER)


@dataclass(slots=True, kw_only=True)
class AuditRecord:
    """One management call. The route fills in what it learns."""

    action: str
    """Method and path pattern of the route."""
    name: str | None = None
    """The adapter's."""
    path: str | None = None
    """Where it was to be loaded from, as the caller wrote it."""
    before: str | None = None
    """Digest that the name stood for before the call."""
    after: str | None = None
    """Digest that it stands for afterwards."""
    outcome: str = "ok"
    """`ok`, or the code of the error that was answered."""
    key: str | None = None
    """Name of the caller's key; None for a caller without a valid one."""
    client: str | None = None
    """The caller's address."""
    request_id: str

    def as_text(self) -> str:
        """Return the line: `name=value` with values in JSON, so that none can end the line."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return " ".join(f"{name}={json.dumps(value)}" for name, value in values.items())


def begin_record(request: Request, *, action: str, request_id: str) -> AuditRecord:
    """Begin the record of one call.

    Args:
        request: the call.
        action: method and path pattern of its route.
        request_id: names the call in the other logs.
    """
    client = None if request.client is None else request.client.host
    return AuditRecord(action=action, client=client, request_id=request_id)


@contextmanager
def written(record: AuditRecord) -> Iterator[None]:
    """Write the line when the block, which is the whole call, ends."""
    try:
        yield
    except RequestError as error:
        record.outcome = error.code
        raise
    except BaseException as error:
        # A body that is no JSON, a failure of ours, a client that left: the kind says which.
        record.outcome = type(error).__name__
        raise
    finally:
        _logger.info("%s", record.as_text(), extra={"audit": record})
