"""`lora-server bench` and its course: plan, warm up, send, report."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from lora_server.cli.bench import compare_command
from lora_server.cli.bench.flags import DEFAULT_NUM_PROMPTS, add_flags
from lora_server.cli.bench.trace import TraceFill, plan_trace, read_trace, write_trace
from lora_server.cli.bench.workload import Workload, plan_requests, with_other_prompts
from lora_server.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from lora_server.cli.bench.load import LoadResult, LoadSettings
    from lora_server.cli.bench.trace import TraceLine
    from lora_server.cli.bench.workload import PlannedRequest

_NOT_CONFIG = (
    *("run", "takes_extras", "command", "action", "api_key"),
    *("output", "report", "save_trace"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command, its flags, and `bench compare`."""
    parser = commands.add_parser(
        "bench",
        help="load test of an OpenAI-compatible server",
        description="Stream completions of random token ids and report throughput and latencies.",
        epilog="Exit status: 0 when every request was answered, otherwise 1.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_flags(parser)
    parser.set_defaults(run=run, takes_extras=False)
    compare_command.add_parser(parser)


def run(parsed: argparse.Namespace, extras: Sequence[str]) -> int:
    """Run the load test, print the figures, and return 0 when no request failed.

    Raises:
        StartupError: the flags contradict each other, a file cannot be read or written, or the
            server does not answer for every model.
    """
    from lora_server.cli.bench.figures import summarise_runs
    from lora_server.cli.bench.load import LoadSettings
    from lora_server.cli.bench.report import describe_machine

    del extras
    _check(parsed)
    trace = None if parsed.trace is None else read_trace(parsed.trace)
    settings = LoadSettings(
        base_url=parsed.base_url.rstrip("/").removesuffix("/v1"),
        api_key=parsed.api_key,
        max_concurrency=parsed.max_concurrency,
        ignore_eos=parsed.ignore_eos,
        timeout_s=parsed.timeout,
    )
    started = datetime.now(UTC)
    model, runs = asyncio.run(_measure(parsed, settings, trace))
    figures = {
        **summarise_runs(runs, parsed.goodput),
        "config": _config(parsed, model),
        "machine": describe_machine(),
        "started_utc": started.isoformat(timespec="seconds"),
    }
    _print(figures)
    _write(figures, runs, parsed.output, parsed.report)
    return 1 if figures["failed"] else 0


def _check(parsed: argparse.Namespace) -> None:
    """Refuse what would only fail after the test, and what would be ignored."""
    problems = [
        f"{flag} {str(path)!r}: the folder does not exist"
        for flag in ("--output", "--report", "--save-trace")
        if (path := getattr(parsed, flag[2:].replace("-", "_"))) and not path.parent.is_dir()
    ]
    if parsed.trace is not None:
        if not math.isinf(parsed.request_rate):
            problems.append("--request-rate: the trace of --trace has its own times")
        if parsed.lora_modules:
            problems.append("--lora-modules: the trace of --trace names its own adapters")
    elif math.isinf(parsed.request_rate) and parsed.burstiness != 1.0:
        problems.append("--burstiness needs a finite --request-rate")
    if parsed.report is not None:
        from lora_server.cli.bench.plots import missing_extra

        problems += missing_extra()
    if problems:
        raise StartupError(problems)


async def _measure(
    parsed: argparse.Namespace, settings: LoadSettings, trace: Sequence[TraceLine] | None
) -> tuple[str, list[LoadResult]]:
    from lora_server.cli.bench.load import first_model, open_client, warm_up

    begin = time.perf_counter()
    async with open_client(settings) as client:
        try:
            async with asyncio.timeout(settings.timeout_s):
                model = parsed.model or await first_model(client)
                requests = _plan(parsed, model, trace)
                others = _other_prompts(parsed, requests, "warm-up")
                await warm_up(client, others, settings, num_requests=parsed.warmup)
        except TimeoutError as error:
            raise StartupError(
                [f"the warm-up took longer than the {settings.timeout_s:g} s of --timeout"]
            ) from error
        runs = []
        for number in range(parsed.repeat):
            planned = _other_prompts(parsed, requests, f"run {number}") if number else requests
            left = max(0.0, settings.timeout_s - (time.perf_counter() - begin))
            runs.append(await _send_with_progress(client, planned, settings, left))
        return model, runs


def _other_prompts(
    parsed: argparse.Namespace, requests: Sequence[PlannedRequest], what: str
) -> list[PlannedRequest]:
    return with_other_prompts(requests, parsed.vocab_size, f"{what} of seed {parsed.seed}")


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


def _plan(
    parsed: argparse.Namespace, model: str, trace: Sequence[TraceLine] | None
) -> list[PlannedRequest]:
    """Plan the requests, from a trace or drawn, and keep them where that is asked for."""
    if trace is None:
        requests = plan_requests(_workload(parsed, model))
    else:
        fill = TraceFill(
            base=model,
            input_len=parsed.random_input_len,
            output_len=parsed.random_output_len,
            vocab_size=parsed.vocab_size,
            seed=parsed.seed,
        )
        requests = plan_trace(trace[: parsed.num_prompts], fill)
    if parsed.save_trace is not None:
        write_trace(parsed.save_trace, requests, base=model)
    return requests


def _workload(parsed: argparse.Namespace, model: str) -> Workload:
    adapters = [name for item in parsed.lora_modules for name in adapter_names(item)]
    with_base = [model] if parsed.include_base or not adapters else []
    return Workload(
        models=(*with_base, *adapters),
        num_prompts=parsed.num_prompts or DEFAULT_NUM_PROMPTS,
        input_len=parsed.random_input_len,
        output_len=parsed.random_output_len,
        popularity=parsed.popularity,
        zipf_s=parsed.zipf_s,
        request_rate=parsed.request_rate,
        burstiness=parsed.burstiness,
        vocab_size=parsed.vocab_size,
        seed=parsed.seed,
    )


def adapter_names(item: str) -> list[str]:
    """Return the names in one item of `--lora-modules`: `a`, `a,b`, or `a=path`."""
    return [name for piece in item.split(",") if (name := piece.partition("=")[0].strip())]


def _config(parsed: argparse.Namespace, model: str) -> dict[str, Any]:
    """Return the flags in force, without the key, ready for JSON."""
    config = {key: value for key, value in vars(parsed).items() if key not in _NOT_CONFIG}
    rate = parsed.request_rate
    return {
        **config,
        "model": model,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "trace": None if parsed.trace is None else str(parsed.trace),
        "goodput": [asdict(objective) for objective in parsed.goodput],
    }


def _print(figures: dict[str, Any]) -> None:
    from rich.console import Console

    from lora_server.cli.bench.report import error_lines, figures_table, note_lines

    Console().print(figures_table(figures))
    for note in note_lines(figures):
        Console().print(note, markup=False, highlight=False)
    for line in error_lines(figures):
        Console(stderr=True).print(line)


def _write(
    figures: dict[str, Any], runs: Sequence[LoadResult], output: Path | None, report: Path | None
) -> None:
    if output is not None:
        output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        print(f"written to {output}", file=sys.stderr)
    if report is not None:
        from lora_server.cli.bench.markdown import write_report

        write_report(report, figures, runs)
        print(f"written to {report}", file=sys.stderr)
