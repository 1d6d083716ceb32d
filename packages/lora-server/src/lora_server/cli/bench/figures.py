"""The figures of a load test, ready for JSON.

Latencies are in milliseconds, `null` where nothing was measured. Requests that failed count as
errors only.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from lora_server.cli.bench.goodput import goodput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lora_server.cli.bench.client import Answer
    from lora_server.cli.bench.goodput import Objective
    from lora_server.cli.bench.load import LoadResult

PERCENTILES = (50, 90, 99)
LATENCIES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "time between events",
    "e2el_ms": "time to the end",
}
RATES = {
    "output_tokens_per_s": "output tokens/s",
    "requests_per_s": "requests/s",
    "total_tokens_per_s": "tokens/s with prompts",
}


def summarise_runs(
    runs: Sequence[LoadResult], objectives: Sequence[Objective] = ()
) -> dict[str, Any]:
    """Return the figures of all runs together, and of each under `runs`.

    Together means: percentiles over the answers of all runs, rates over the sum of their times.
    """
    answers = [answer for run in runs for answer in run.answers]
    total = _summarise(answers, sum(run.duration_s for run in runs), objectives)
    each = [_summarise(run.answers, run.duration_s, objectives) for run in runs]
    kept = (*RATES, *LATENCIES, "duration_s", "completed", "failed", "goodput")
    return {**total, "runs": [{key: one[key] for key in kept} for one in each]}


def _summarise(
    answers: Sequence[Answer], duration_s: float, objectives: Sequence[Objective]
) -> dict[str, Any]:
    good = [answer for answer in answers if answer.error is None]
    failed = Counter(answer.error for answer in answers if answer.error is not None)
    input_tokens = sum(answer.input_tokens for answer in good)
    output_tokens = sum(answer.output_tokens for answer in good)
    models = per_model(answers)
    is_counted = all(answer.is_counted_by_server for answer in good)
    return {
        "output_tokens_per_s": output_tokens / duration_s,
        "requests_per_s": len(good) / duration_s,
        "total_tokens_per_s": (output_tokens + input_tokens) / duration_s,
        **latencies(good),
        "duration_s": duration_s,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "errors": [{"message": text, "count": n} for text, n in failed.most_common()],
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "short_answers": sum(answer.output_tokens < answer.asked_tokens for answer in good),
        "tokens_counted_by": "server" if is_counted else "events",
        "requests_per_model": {name: one["requests"] for name, one in models.items()},
        "per_model": models,
        "worst_model": {key: worst_model(models, key) for key in ("ttft_ms", "tpot_ms")},
        "goodput": goodput(answers, objectives, duration_s),
    }


def per_model(answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Return counts and latencies of each model, by name."""
    by_model: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        by_model[answer.model].append(answer)
    figures = {}
    for name, own in sorted(by_model.items()):
        good = [answer for answer in own if answer.error is None]
        spreads = latencies(good)
        figures[name] = {
            "requests": len(own),
            "failed": len(own) - len(good),
            "output_tokens": sum(answer.output_tokens for answer in good),
            "ttft_ms": spreads["ttft_ms"],
            "tpot_ms": spreads["tpot_ms"],
        }
    return figures


def worst_model(models: dict[str, dict[str, Any]], latency: str) -> str | None:
    """Name the model with the largest mean; a tail of few requests would be chance."""
    means = {name: one[latency]["mean"] for name, one in models.items()}
    measured = {name: mean for name, mean in means.items() if mean is not None}
    return max(measured, key=measured.__getitem__) if measured else None


def latencies(good: Sequence[Answer]) -> dict[str, dict[str, float | None]]:
    """Return mean and percentiles of every latency."""
    tpots = [tpot for answer in good if (tpot := answer.tpot_s) is not None]
    return {
        "ttft_ms": spread([answer.ttft_s for answer in good]),
        "tpot_ms": spread(tpots),
        "itl_ms": spread([itl for answer in good for itl in answer.itls_s]),
        "e2el_ms": spread([answer.duration_s for answer in good]),
    }


def spread(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return mean and percentiles in milliseconds."""
    if not seconds:
        return dict.fromkeys(("mean", *(f"p{p}" for p in PERCENTILES)))
    ordered = sorted(seconds)
    figures = {"mean": math.fsum(ordered) / len(ordered)}
    figures |= {f"p{p}": percentile(ordered, p) for p in PERCENTILES}
    return {name: value * 1000 for name, value in figures.items()}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values, linear between neighbours."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
