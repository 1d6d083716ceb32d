"""The table at start: what is in force, who set it, and no secret."""

from __future__ import annotations

import io

from rich.console import Console

from lora_server.cli.config_table import print_table
from lora_server.options import resolve


def printed(arguments: dict[str, object], environ: dict[str, str] | None = None) -> str:
    stream = io.StringIO()
    resolved = resolve({"model": "m", **arguments}, environ=environ or {})
    print_table(resolved, Console(file=stream, width=120))
    return stream.getvalue()


def test_each_value_is_printed_with_who_set_it() -> None:
    text = printed({"max_loras": "3"}, {"LORA_SERVER_MAX_LORA_RANK": "5"})

    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()}
    assert lines["--max-loras"] == ["3", "command", "line"]
    assert lines["--max-lora-rank"] == ["5", "environment"]
    assert lines["--max-adapter-wait"] == ["2.0", "seconds", "default"]
    assert lines["--enable-lora"] == ["on", "default"]
    assert "--tensor-parallel-size" not in lines


def test_keys_are_not_printed() -> None:
    text = printed({"api_key": ["secret-one"], "admin_api_key": "secret-two"})

    assert "secret" not in text
    assert text.count("(set, not shown)") == 2


def test_names_in_square_brackets_are_printed_as_they_are() -> None:
    text = printed({"lora_modules": ["[bold]a=/p"]})

    assert "[bold]a=/p" in text
