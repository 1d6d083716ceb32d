"""The flags of `lora-server bench` and its course: plan, warm up, send, report."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_server.cli.bench.workload import Popularity, Workload, plan_requests
from lora_server.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lora_server.cli.bench.load import LoadResult, LoadSettings
    from lora_server.cli.bench.workload import PlannedRequest


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = commands.add_parser(
        "bench",
        help="load test of an OpenAI-compatible server",
        description="Stream completions of random token ids and report throughput and latencies.",
        epilog="Exit status: 0 when every request was answered, otherwise 1.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
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
    add("--num-prompts", type=_count, default=128, metavar="N", help="requests to send")
    add("--max-concurrency", type=_count, default=16, metavar="N", help="requests in flight")
    add("--request-rate", type=_rate, default=math.inf, metavar="X", help="requests per second")
    add("--random-input-len", type=_count, default=128, metavar="N", help="tokens of a prompt")
    add("--random-output-len", type=_count, default=64, metavar="N", help="tokens of an answer")
    add("--vocab-size", type=_count, default=32000, metavar="N", help="token ids are below this")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for exactly the length of an answer, also after an end token",
    )
    add("--seed", type=int, default=0, metavar="N", help="draws prompts, adapters and arrivals")
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add(
        "--timeout", type=_seconds, default=600.0, metavar="SECONDS", help="bound on the whole test"
    )
    add("--output", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.set_defaults(run=run, takes_extras=False)


def run(parsed: argparse.Namespace, extras: Sequence[str]) -> int:
    """Run the load test, print the figures, and return 0 when no request failed.

    Raises:
        StartupError: when the server does not answer for every model.
    """
    from lora_server.cli.bench.load import LoadSettings
    from lora_server.cli.bench.report import describe_machine, summarise

    del extras
    if parsed.output is not None and not parsed.output.parent.is_dir():
        raise StartupError([f"--output {str(parsed.output)!r}: the folder does not exist"])
    settings = LoadSettings(
        base_url=parsed.base_url.rstrip("/").removesuffix("/v1"),
        api_key=parsed.api_key,
        max_concurrency=parsed.max_concurrency,
        output_len=parsed.random_output_len,
        ignore_eos=parsed.ignore_eos,
        timeout_s=parsed.timeout,
    )
    started = datetime.now(UTC)
    model, result = asyncio.run(_measure(parsed, settings))
    figures = {
        **summarise(result, input_len=parsed.random_input_len, output_len=parsed.random_output_len),
        "config": _config(parsed, model),
        "machine": describe_machine(),
        "started_utc": started.isoformat(timespec="seconds"),
    }
    _report(figures, parsed.output)
    return 1 if figures["failed"] else 0


async def _measure(parsed: argparse.Namespace, settings: LoadSettings) -> tuple[str, LoadResult]:
    from lora_server.cli.bench.load import first_model, open_client, warm_up

    begin = time.perf_counter()
    async with open_client(settings) as client:
        try:
            async with asyncio.timeout(settings.timeout_s):
                model = parsed.model or await first_model(client)
                requests = plan_requests(_workload(parsed, model))
                await warm_up(client, requests, settings)
        except TimeoutError as error:
            raise StartupError(
                [f"the warm-up took longer than the {settings.timeout_s:g} s of --timeout"]
            ) from error
        left = max(0.0, settings.timeout_s - (time.perf_counter() - begin))
        return model, await _send_with_progress(client, requests, settings, left)


async def _send_with_progress(
    client: Any, requests: Sequence[PlannedRequest], settings: LoadSettings, timeout_s: float
) -> LoadResult:
    """Send all requests; a bar on stderr, redrawn twice a second so that it costs nothing."""
    from rich.console import Console
    from rich.progress import Progress

    from lora_server.cli.bench.load import send_all

    console = Console(stderr=True)
    with Progress(console=console, refresh_per_second=2, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=len(requests))
        on_answer: Callable[[], None] = lambda: bar.advance(task)  # noqa: E731
        return await send_all(client, requests, settings, timeout_s=timeout_s, on_answer=on_answer)


def _workload(parsed: argparse.Namespace, model: str) -> Workload:
    adapters = [name for item in parsed.lora_modules for name in adapter_names(item)]
    with_base = [model] if parsed.include_base or not adapters else []
    return Workload(
        models=(*with_base, *adapters),
        num_prompts=parsed.num_prompts,
        input_len=parsed.random_input_len,
        output_len=parsed.random_output_len,
        popularity=parsed.popularity,
        request_rate=parsed.request_rate,
        vocab_size=parsed.vocab_size,
        seed=parsed.seed,
    )


def adapter_names(item: str) -> list[str]:
    """Return the names in one item of `--lora-modules`: `a`, `a,b`, or `a=path`."""
    return [name for piece in item.split(",") if (name := piece.partition("=")[0].strip())]


def _config(parsed: argparse.Namespace, model: str) -> dict[str, Any]:
    """Return the flags in force, without the key, ready for JSON."""
    hidden = ("run", "takes_extras", "command", "api_key", "output")
    config = {key: value for key, value in vars(parsed).items() if key not in hidden}
    rate = parsed.request_rate
    return {**config, "model": model, "request_rate": "inf" if math.isinf(rate) else rate}


def _report(figures: dict[str, Any], output: Path | None) -> None:
    from rich.console import Console

    from lora_server.cli.bench.report import error_lines, figures_table

    Console().print(figures_table(figures))
    for line in error_lines(figures):
        Console(stderr=True).print(line)
    if output is not None:
        output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        print(f"written to {output}", file=sys.stderr)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _seconds(text: str) -> float:
    value = _rate(text)
    if math.isinf(value):
        raise argparse.ArgumentTypeError("a load test is bounded in time")
    return value
