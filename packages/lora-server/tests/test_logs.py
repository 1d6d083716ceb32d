"""The two forms of a log line: complete, one line each, and safe to read."""

from __future__ import annotations

import io
import json
import logging
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from lora_server.exchange import Exchange, current_exchange
from lora_server.logs import JsonFormatter, TextFormatter, log_fields, start_logging, take_over

if TYPE_CHECKING:
    from collections.abc import Iterator


def record(message: str, *args: object, **extra: Any) -> logging.LogRecord:
    logger = logging.getLogger("lora_server.test")
    return logger.makeRecord(
        logger.name, logging.INFO, "file", 1, message, args, None, extra=extra or None
    )


@pytest.fixture
def served() -> Iterator[None]:
    token = current_exchange.set(Exchange(request_id="r-9"))
    yield
    current_exchange.reset(token)


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """Give the process its logging back afterwards."""
    logger = logging.getLogger()
    before = (list(logger.handlers), logger.level)
    yield logger
    logging.captureWarnings(capture=False)
    logger.handlers[:] = before[0]
    logger.setLevel(before[1])


def test_text_is_the_message_and_then_the_fields() -> None:
    fields = log_fields(adapter="sql", digest="ab", ms=1.23456, bytes=10, absent=None)

    line = TextFormatter().format(record("Loaded %s", "it", **fields))

    assert line.endswith(
        " INFO lora_server.test: Loaded it adapter=sql digest=ab ms=1.235 bytes=10"
    )


def test_json_is_one_object_with_the_same() -> None:
    line = JsonFormatter().format(record("Loaded %s", "it", **log_fields(adapter="größe", ms=1.5)))

    content = json.loads(line)
    assert "\n" not in line
    assert "größe" in line
    assert content.pop("time").endswith("+00:00")
    assert content == {
        "level": "info",
        "logger": "lora_server.test",
        "message": "Loaded it",
        "adapter": "größe",
        "ms": 1.5,
    }


@pytest.mark.usefixtures("served")
def test_lines_have_the_id_of_the_request_that_is_served() -> None:
    assert TextFormatter().format(record("x")).endswith(": x request_id=r-9")
    assert json.loads(JsonFormatter().format(record("x")))["request_id"] == "r-9"


@pytest.mark.usefixtures("served")
def test_an_id_of_the_lines_own_goes_first_and_is_not_said_twice() -> None:
    named = record("request r-1 failed", **log_fields(request_id="r-1"))

    assert TextFormatter().format(named).endswith(": request r-1 failed")
    assert json.loads(JsonFormatter().format(named))["request_id"] == "r-1"


@pytest.mark.parametrize("evil", ["a\nINFO x: y", "a\r\nb", "a\x1b[2Jb", "a\u2028b", "a\x85b"])
def test_no_value_and_no_message_can_end_a_line(evil: str) -> None:
    for line in (
        TextFormatter().format(record("%s", evil)),
        TextFormatter().format(record("x", **log_fields(adapter=evil))),
        JsonFormatter().format(record("%s", evil, **log_fields(adapter=evil))),
    ):
        assert len(line.splitlines()) == 1 or line.startswith("{")
        assert "\n" not in line
        assert "\x1b" not in line


@pytest.mark.parametrize("value", ["two words", 'quo"te', "a=b", "", "it's", "back\\slash"])
def test_a_value_that_could_be_misread_is_quoted(value: str) -> None:
    line = TextFormatter().format(record("x", **log_fields(adapter=value)))

    _, _, written = line.partition("adapter=")
    assert json.loads(written) == value


def failure(text: str) -> logging.LogRecord:
    made = record("failed")
    try:
        int(text)
    except ValueError:
        made.exc_info = sys.exc_info()
    return made


def test_a_traceback_is_indented_in_text_and_a_field_in_json() -> None:
    first, *rest = TextFormatter().format(failure("bad\n2026 INFO x: y")).splitlines()
    content = json.loads(JsonFormatter().format(failure("bad")))

    assert first.endswith(": failed")
    assert rest
    assert all(line.startswith("  ") for line in rest)
    assert content["exception"].endswith("base 10: 'bad'\n")


def test_an_audit_record_is_spelled_out_in_json() -> None:
    @dataclass
    class Audit:
        action: str
        key: str | None = None

    line = JsonFormatter().format(record("action=...", audit=Audit("POST /v1/x")))

    assert json.loads(line)["audit"] == {"action": "POST /v1/x"}


def test_a_library_that_prints_by_itself_is_taken_over(root: logging.Logger) -> None:
    library = logging.getLogger("some_library")
    own = logging.StreamHandler(io.StringIO())
    library.addHandler(own)
    library.propagate = False

    take_over("some_library")

    assert (library.handlers, library.propagate) == ([], True)


def test_with_json_warnings_of_python_are_lines_too(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    start_logging(level="info", is_json=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=True)
        warnings.warn("old name", FutureWarning, stacklevel=1)
        logging.captureWarnings(capture=False)

    (line,) = capsys.readouterr().err.splitlines()
    assert "old name" in json.loads(line)["message"]


@pytest.mark.parametrize(("level", "is_shown"), [("info", False), ("debug", True)])
def test_http_clients_are_quiet_unless_somebody_looks_for_a_bug(
    level: str, is_shown: bool, root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    start_logging(level=level, is_json=False)

    logging.getLogger("httpx").info("GET /")

    assert ("GET /" in capsys.readouterr().err) == is_shown
