"""What a load test sends: which model each request names, its prompt, and when it arrives.

Everything follows from one seed. Knows nothing of HTTP or time.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request of a load test."""

    model: str
    prompt: tuple[int, ...]
    """Token ids, `input_len` of them."""
    arrival_s: float
    """Seconds after the start at which it is sent, at the earliest."""


def plan_requests(workload: Workload) -> list[PlannedRequest]:
    """Draw all requests, by arrival. The same workload gives the same requests."""
    draw = random.Random(workload.seed)  # noqa: S311 - a load test, not a secret
    models = choose_models(workload.models, workload.num_prompts, workload.popularity, draw)
    low = min(_FIRST_TOKEN, workload.vocab_size - 1)
    vocabulary = range(low, workload.vocab_size)
    arrivals = itertools.accumulate(_pause(workload.request_rate, draw) for _ in models)
    return [
        PlannedRequest(
            model=model,
            prompt=tuple(draw.choices(vocabulary, k=workload.input_len)),
            arrival_s=arrival,
        )
        for model, arrival in zip(models, arrivals, strict=True)
    ]


def choose_models(
    models: Sequence[str], count: int, popularity: Popularity, draw: random.Random
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
            weights = [1 / (k + 1) ** ZIPF_EXPONENT for k in range(len(models))]
            return draw.choices(models, weights, k=count)


def _pause(rate: float, draw: random.Random) -> float:
    """Draw the seconds to the next arrival of a Poisson process."""
    return 0.0 if math.isinf(rate) else draw.expovariate(rate)
