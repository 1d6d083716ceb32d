"""Goodput: requests that were answered as fast as was promised, per second.

Spelled as in vLLM's benchmark: `--goodput ttft:500 tpot:50`, milliseconds.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lora_server.cli.bench.client import Answer

METRICS = ("ttft", "tpot", "e2el")
"""Time to the first token, time per further token, time to the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The longest time of one kind that is still good."""

    metric: str
    limit_ms: float


def parse_objective(text: str) -> Objective:
    """Read `ttft:500`.

    Raises:
        ArgumentTypeError: it is none.
    """
    metric, _, limit = text.partition(":")
    try:
        limit_ms = float(limit)
    except ValueError:
        limit_ms = math.nan
    if metric not in METRICS or not 0 < limit_ms < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an objective such as ttft:500; there are {', '.join(METRICS)}"
        )
    return Objective(metric=metric, limit_ms=limit_ms)


def goodput(
    answers: Sequence[Answer], objectives: Sequence[Objective], duration_s: float
) -> dict[str, Any] | None:
    """Count the answers that meet every objective; None without objectives.

    An answer that failed meets none. One of a single token meets any time per further token.
    """
    if not objectives:
        return None
    good = sum(_is_good(answer, objectives) for answer in answers)
    return {
        "objectives_ms": {o.metric: o.limit_ms for o in objectives},
        "good": good,
        "share": good / len(answers),
        "requests_per_s": good / duration_s,
    }


def _is_good(answer: Answer, objectives: Sequence[Objective]) -> bool:
    if answer.error is not None:
        return False
    times_s = {"ttft": answer.ttft_s, "tpot": answer.tpot_s or 0.0, "e2el": answer.duration_s}
    return all(times_s[o.metric] * 1000 <= o.limit_ms for o in objectives)
