"""What a load test sends: which model each request names, its prompt, and when it arrives.

Everything follows from one seed. Knows nothing of HTTP or time.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ZIPF_EXPONENT = 1.5
"""Weight of the k-th model under `zipf` is `1 / k ** 1.5`, as in the Punica paper."""

_FIRST_TOKEN = 256
"""Special tokens and single bytes are below this in common vocabularies; they are not drawn."""


class Popularity(StrEnum):
    """How requests are spread over the models."""

    DISTINCT = "distinct"
    """In turn, so that neighbours differ."""
    UNIFORM = "uniform"
    """Drawn with equal chances."""
    ZIPF = "zipf"
    """Drawn, the first model most often."""
    IDENTICAL = "identical"
    """All for the first model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The parameters of a load test."""

    models: tuple[str, ...]
    """Names that requests use, in the order of their popularity; at least one."""
    num_prompts: int
    input_len: int
    """Tokens of each prompt."""
    output_len: int
    """Tokens asked for."""
    popularity: Popularity
    request_rate: float
    """Requests per second; infinity sends them at once."""
    vocab_size: int
    """Token ids are drawn below this."""
    seed: int
    zipf_s: float = ZIPF_EXPONENT
    """Exponent under `zipf`."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of pauses: 1 is a Poisson process, less comes in bursts,
    more comes evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request of a load test."""

    model: str
    prompt: tuple[int, ...]
    """Token ids."""
    output_len: int
    """Tokens asked for."""
    arrival_s: float
    """Seconds after the start at which it is sent, at the earliest."""


def plan_requests(workload: Workload) -> list[PlannedRequest]:
    """Draw all requests, by arrival. The same workload gives the same requests."""
    draw = random.Random(workload.seed)  # noqa: S311 - a load test, not a secret
    models = choose_models(
        workload.models, workload.num_prompts, workload.popularity, draw, zipf_s=workload.zipf_s
    )
    arrivals = itertools.accumulate(
        draw_pause(workload.request_rate, workload.burstiness, draw) for _ in models
    )
    return [
        PlannedRequest(
            model=model,
            prompt=draw_prompt(workload.input_len, workload.vocab_size, draw),
            output_len=workload.output_len,
            arrival_s=arrival,
        )
        for model, arrival in zip(models, arrivals, strict=True)
    ]


def choose_models(
    models: Sequence[str],
    count: int,
    popularity: Popularity,
    draw: random.Random,
    *,
    zipf_s: float = ZIPF_EXPONENT,
) -> list[str]:
    """Name the model of each of `count` requests."""
    match popularity:
        case Popularity.DISTINCT:
            return [models[i % len(models)] for i in range(count)]
        case Popularity.IDENTICAL:
            return [models[0]] * count
        case Popularity.UNIFORM:
            return draw.choices(models, k=count)
        case Popularity.ZIPF:
            weights = [1 / (k + 1) ** zipf_s for k in range(len(models))]
            return draw.choices(models, weights, k=count)


def with_other_prompts(
    requests: Sequence[PlannedRequest], vocab_size: int, purpose: str
) -> list[PlannedRequest]:
    """Return the same requests with prompts that a server has not seen yet.

    Otherwise a server that keeps prompts would answer a warm-up's or an earlier run's requests
    faster.

    Args:
        requests: what was planned.
        vocab_size: token ids are drawn below this.
        purpose: another text draws other prompts.
    """
    draw = random.Random(purpose)  # noqa: S311 - a load test, not a secret
    return [
        replace(request, prompt=draw_prompt(len(request.prompt), vocab_size, draw))
        for request in requests
    ]


def draw_prompt(length: int, vocab_size: int, draw: random.Random) -> tuple[int, ...]:
    """Draw a prompt's token ids."""
    low = min(_FIRST_TOKEN, vocab_size - 1)
    return tuple(draw.choices(range(low, vocab_size), k=length))


def draw_pause(rate: float, burstiness: float, draw: random.Random) -> float:
    """Draw the seconds to the next arrival.

    Pauses have the mean `1 / rate` and the variance `1 / (rate ** 2 * burstiness)`.
    """
    return 0.0 if math.isinf(rate) else draw.gammavariate(burstiness, 1 / (rate * burstiness))
