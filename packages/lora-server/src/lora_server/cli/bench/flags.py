"""The flags of `lora-server bench`; those that `vllm bench serve` has keep its names."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from lora_server.cli.bench.goodput import METRICS, parse_objective
from lora_server.cli.bench.workload import ZIPF_EXPONENT, Popularity

DEFAULT_NUM_PROMPTS = 128


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare everything but what `compare` takes."""
    _add_workload(parser)
    _add_course(parser)
    _add_results(parser)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="the server")
    add("--model", metavar="NAME", help="the base model; by default the server's first model")
    add("--lora-modules", nargs="+", default=[], metavar="NAME", help="adapters to ask for")
    add("--include-base", action="store_true", help="ask for the base too, first in popularity")
    add(
        "--popularity",
        type=Popularity,
        choices=tuple(Popularity),
        default=Popularity.UNIFORM,
        help="how requests are spread: in turn, by equal chance, the first most, only the first",
    )
    add(
        "--zipf-s",
        type=positive,
        default=ZIPF_EXPONENT,
        metavar="S",
        help="under zipf the k-th model has the weight 1 / k ** S",
    )
    add(
        "--num-prompts",
        type=count,
        metavar="N",
        help=f"requests to send; {DEFAULT_NUM_PROMPTS}, or all of a trace, unless given",
    )
    add("--random-input-len", type=count, default=128, metavar="N", help="tokens of a prompt")
    add("--random-output-len", type=count, default=64, metavar="N", help="tokens of an answer")
    add("--vocab-size", type=count, default=32000, metavar="N", help="token ids are below this")
    add("--trace", type=Path, metavar="FILE", help="send the requests of this file at its times")
    add("--save-trace", type=Path, metavar="FILE", help="write the planned requests to this file")
    add("--seed", type=int, default=0, metavar="N", help="draws prompts, adapters and arrivals")


def _add_course(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--max-concurrency", type=count, default=16, metavar="N", help="requests in flight")
    add("--request-rate", type=positive, default=math.inf, metavar="X", help="requests per second")
    add(
        "--burstiness",
        type=finite,
        default=1.0,
        metavar="X",
        help="shape of the gamma distribution of arrivals: 1 is Poisson, less comes in bursts",
    )
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for exactly the length of an answer, also after an end token",
    )
    add(
        "--warmup",
        "--num-warmups",
        dest="warmup",
        type=count_or_zero,
        default=0,
        metavar="N",
        help="requests before the test, after a short one for each model",
    )
    add("--repeat", type=count, default=1, metavar="N", help="runs of the whole test")
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add("--timeout", type=finite, default=600.0, metavar="SECONDS", help="bound on the whole test")


def _add_results(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--goodput",
        type=parse_objective,
        nargs="+",
        default=[],
        metavar="KEY:MS",
        help=f"count requests within all of these milliseconds; KEY is one of {', '.join(METRICS)}",
    )
    add("--output", type=Path, metavar="FILE", help="write the figures as JSON")
    add(
        "--report",
        type=Path,
        metavar="FILE.md",
        help="write a report in Markdown, with plots beside it; needs the extra bench",
    )


def count(text: str) -> int:
    """Read a positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def count_or_zero(text: str) -> int:
    """Read a whole number."""
    return 0 if text == "0" else count(text)


def positive(text: str) -> float:
    """Read a positive number, which may be `inf`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def finite(text: str) -> float:
    """Read a positive number that is not `inf`."""
    value = positive(text)
    if math.isinf(value):
        raise argparse.ArgumentTypeError("expected a finite number")
    return value
