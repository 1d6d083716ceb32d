"""Traces: which adapter was asked when, and how much, as lines of JSON.

One request a line, in any order: `{"at": 1.25, "adapter": "sql", "prompt_tokens": 120,
"output_tokens": 40}`. `at` is in seconds from any start; an `adapter` that is null, empty or
absent is the base; lengths that are absent are those of the command line.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_server.cli.bench.workload import PlannedRequest, draw_prompt
from lora_server.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_FIELDS = frozenset({"at", "adapter", "prompt_tokens", "output_tokens"})
_MAX_PROBLEMS = 20
_MAX_LEN = 1_000_000
"""Of a prompt or an answer: a misplaced number should not fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLine:
    """One request of a trace."""

    at_s: float
    adapter: str | None = None
    """None is the base."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFill:
    """What a trace leaves open."""

    base: str
    """Name of the base."""
    input_len: int
    output_len: int
    vocab_size: int
    seed: int


def read_trace(path: Path) -> list[TraceLine]:
    """Read a trace and sort it by time.

    Raises:
        StartupError: with every line that is not understood, up to twenty.
    """
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise StartupError([f"--trace {path}: {error}"]) from error
    lines: list[TraceLine] = []
    problems: list[str] = []
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            lines.append(_parse(text))
        except ValueError as error:
            problems.append(f"--trace {path}:{number}: {error}")
    if not lines and not problems:
        problems.append(f"--trace {path} has no request")
    if problems:
        raise StartupError(problems[:_MAX_PROBLEMS])
    return sorted(lines, key=lambda line: line.at_s)


def write_trace(path: Path, requests: Sequence[PlannedRequest], *, base: str) -> None:
    """Write requests so that reading them plans the same arrivals, models and lengths."""
    texts = (
        json.dumps(
            {
                "at": request.arrival_s,
                "adapter": None if request.model == base else request.model,
                "prompt_tokens": len(request.prompt),
                "output_tokens": request.output_len,
            }
        )
        for request in requests
    )
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")


def plan_trace(lines: Sequence[TraceLine], fill: TraceFill) -> list[PlannedRequest]:
    """Plan the requests of a trace; the first is sent at once. Prompts follow from the seed."""
    draw = random.Random(fill.seed)  # noqa: S311 - a load test, not a secret
    start = lines[0].at_s
    return [
        PlannedRequest(
            model=line.adapter or fill.base,
            prompt=draw_prompt(line.prompt_tokens or fill.input_len, fill.vocab_size, draw),
            output_len=line.output_tokens or fill.output_len,
            arrival_s=line.at_s - start,
        )
        for line in lines
    ]


def _parse(text: str) -> TraceLine:
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("expected an object")  # noqa: TRY004 - a file's fault, told as such
    unknown = sorted(content.keys() - _FIELDS)
    if unknown:
        raise ValueError(f"there is no field {', '.join(unknown)}")
    at = content.get("at")
    if isinstance(at, bool) or not isinstance(at, int | float) or not math.isfinite(at):
        raise ValueError(f"at is {at!r}, expected seconds")
    adapter = content.get("adapter")
    if adapter is not None and not isinstance(adapter, str):
        raise ValueError(f"adapter is {adapter!r}, expected a name or null")
    return TraceLine(
        at_s=float(at),
        adapter=adapter or None,
        prompt_tokens=_length(content, "prompt_tokens"),
        output_tokens=_length(content, "output_tokens"),
    )


def _length(content: dict[str, Any], name: str) -> int | None:
    value = content.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_LEN:
        raise ValueError(f"{name} is {value!r}, expected a number from 1 to {_MAX_LEN}")
    return value
