"""How log lines are written: as text or as JSON, one line each, with the request they belong to.

A message is a sentence that does not change; what changes comes as fields beside it
(`extra=log_fields(adapter=name)`), so that lines can be searched and counted. Knows nothing of what
is logged.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from lora_server.exchange import current_request_id

if TYPE_CHECKING:
    from collections.abc import Mapping

DIGEST_CHARS: Final = 12
"""Of a digest, in log lines."""

_TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PLAIN: Final = re.compile(r"[^\s\"'=\\]+")
# what could end a line or hide one
_BREAKS: Final = {code: repr(chr(code))[1:-1] for code in (*range(32), 127, 0x85, 0x2028, 0x2029)}


def log_fields(**fields: object) -> Mapping[str, object]:
    """Return the `extra` of a log call that puts these fields into its line; None is left out."""
    return {"fields": {name: value for name, value in fields.items() if value is not None}}


def start_logging(*, level: str, is_json: bool) -> None:
    """Send all log lines of the process to stderr in one form, those of libraries too."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if is_json else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(is_json)
    # what was changed, and by whom, is recorded at every level
    logging.getLogger("lora_server.audit").setLevel(logging.INFO)
    # one line for each call of an HTTP client is of use to somebody looking for a bug only
    quiet = logging.NOTSET if level == "debug" else logging.WARNING
    for name in ("httpx", "httpcore", "asyncio", "urllib3"):
        logging.getLogger(name).setLevel(quiet)


def take_over(library: str) -> None:
    """Let a library that prints its log lines by itself send them where ours go."""
    logger = logging.getLogger(library)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.propagate = True


class TextFormatter(logging.Formatter):
    """Lines for people: the message, then `name=value`."""

    def __init__(self) -> None:
        super().__init__(_TEXT_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - of the base class
        """Return the line without a traceback."""
        line = super().formatMessage(record).translate(_BREAKS)
        fields = fields_of(record)
        if fields.get("request_id") in line.split():
            del fields["request_id"]
        return " ".join([line, *(f"{name}={_text(value)}" for name, value in fields.items())])

    def formatException(self, ei: Any) -> str:  # noqa: N802 - of the base class
        """Return a traceback, indented so that no line of it looks like one of the log's."""
        text = super().formatException(ei)
        return "\n".join(f"  {part.translate(_BREAKS)}" for part in text.splitlines())


class JsonFormatter(logging.Formatter):
    """Lines for programs: one object each."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object."""
        content: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            content["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(content, ensure_ascii=False, default=str)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields of a line: its own, and the id of the request that is being served."""
    fields: dict[str, object] = dict(getattr(record, "fields", {}))
    audit = getattr(record, "audit", None)
    if is_dataclass(audit) and not isinstance(audit, type) and not fields:
        fields = {"audit": {k: v for k, v in asdict(audit).items() if v is not None}}
    request_id = fields.pop("request_id", None) or current_request_id()
    if request_id is not None:
        fields["request_id"] = request_id
    return fields


def _text(value: object) -> str:
    """Return a value so that its end can be seen and it cannot end the line."""
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.isprintable():
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())
