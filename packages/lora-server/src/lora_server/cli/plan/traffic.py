"""Which adapter each request uses: read from a trace, or drawn from a popularity.

Names in order; knows nothing of caches or bytes.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING

from lora_server.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class _LineError(Exception):
    """What a line of a trace is instead of a request."""


NUM_DRAWN = 20_000
"""Requests drawn from a popularity; the first half only fills the tiers."""
_SEED = 0
_MAX_PROBLEMS = 8


def read_trace(path: str, *, base_names: Collection[str]) -> list[str]:
    """Read a trace: JSON lines with an adapter's name and, if it has one, a time in seconds.

    `{"adapter": "a", "at": 0.25}`: the lines of `lora-server bench --save-trace`, of which the
    other fields play no part here. Without times the lines are in order. Requests of the base (an
    adapter that is null, empty, absent beside a time, or one of `base_names`) are left out.

    Raises:
        StartupError: the file cannot be read, or lines of it mean nothing; the first are named.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError([f"--trace {path!r} cannot be read: {error}"]) from error
    problems: list[str] = []
    found: list[tuple[float, str]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            at, name = _read_line(line)
        except _LineError as error:
            problems.append(f"{path}, line {number}: {error}")
            continue
        if name and name not in base_names:
            found.append((at, name))
    if not found and not problems:
        problems.append(f"{path}: no request of an adapter")
    if problems:
        left = len(problems) - _MAX_PROBLEMS
        more = [f"{path}: {left} more lines"] if left > 0 else []
        raise StartupError([*problems[:_MAX_PROBLEMS], *more])
    return [name for _, name in sorted(found, key=lambda request: request[0])]


def _read_line(line: str) -> tuple[float, str]:
    """Return time and name of one request.

    Raises:
        _LineError: it is none.
    """
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise _LineError(f"no JSON: {error.msg}") from error
    if not isinstance(content, dict):
        raise _LineError(f"expected an object, found {type(content).__name__}")
    if "adapter" not in content and "at" not in content:
        raise _LineError('expected {"adapter": NAME, "at": SECONDS}, found no "adapter"')
    name = content.get("adapter")
    if not isinstance(name, str | None):
        raise _LineError(f"adapter is {name!r}, expected a name or null")
    at = content.get("at", 0.0)
    if isinstance(at, bool) or not isinstance(at, int | float) or not math.isfinite(at):
        raise _LineError(f"the time is {at!r}, expected seconds")
    return float(at), name or ""


def draw_zipf(names: Sequence[str], exponent: float) -> list[str]:
    """Draw requests of which the k-th name gets a share as `1 / k ** exponent`; always the same."""
    draw = random.Random(_SEED)  # noqa: S311 - a simulation, not a secret
    weights = [(k + 1) ** -exponent for k in range(len(names))]
    return draw.choices(names, weights, k=NUM_DRAWN)
