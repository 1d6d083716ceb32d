"""Goals of the CPU that are measured over HTTP: throughput, one request alone, start, overhead.

Servers are processes of the command line, the load is that of `lora-server bench`.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from lora_server.cli.bench.figures import summarise_runs
from lora_server.cli.bench.load import LoadSettings, open_client, send_all, warm_up
from lora_server.cli.bench.workload import (
    Popularity,
    Workload,
    plan_requests,
    with_other_prompts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


BASE = "base"
CONCURRENCY = 16
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
VOCABULARY = 32000
START_WITHIN_S = 120.0
END_WITHIN_S = 30.0
_POLL_S = 0.02
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A server that answers."""

    url: str
    seconds: float
    """From the start of the process to the first 200 of `/health`."""


@contextmanager
def started(
    arguments: Sequence[str],
    log: Path,
    *,
    module: str = "lora_server.cli.main",
    variables: Sequence[str] = (),
) -> Iterator[Started]:
    """Run `lora-server ARGUMENTS`, or a module in its place, until the block ends.

    Args:
        arguments: of the command line.
        log: where its output goes.
        module: what is run.
        variables: `NAME=VALUE` of its environment; an empty value counts as unset for Python.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = ["env", "HF_HUB_OFFLINE=1", *variables, sys.executable, "-m", module, *arguments]
    line += ["--port", str(port)]
    start_s = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(line, stdout=file, stderr=file, cwd=_ROOT)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, process, log)
        yield Started(url=url, seconds=time.perf_counter() - start_s)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(_POLL_S)
    raise RuntimeError(f"no server: {log.read_text(errors='replace')[-2000:]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of load."""

    url: str
    models: tuple[str, ...]
    num_prompts: int
    popularity: Popularity = Popularity.UNIFORM
    concurrency: int = CONCURRENCY
    input_len: int = PROMPT_TOKENS
    output_len: int = OUTPUT_TOKENS


def send(case: Case, *, seed: int) -> dict[str, Any]:
    """Send one load, after a short request for each of its models; return the bench's figures.

    Raises:
        RuntimeError: a request failed.
    """
    found = asyncio.run(_send(case, seed))
    figures = summarise_runs([found])
    if figures["failed"]:
        raise RuntimeError(f"{case.models}: {figures['errors']}")
    return figures


async def _send(case: Case, seed: int) -> Any:
    settings = LoadSettings(
        base_url=case.url,
        api_key=None,
        max_concurrency=case.concurrency,
        ignore_eos=True,
        timeout_s=200.0,
    )
    workload = Workload(
        models=case.models,
        num_prompts=case.num_prompts,
        input_len=case.input_len,
        output_len=case.output_len,
        popularity=case.popularity,
        request_rate=float("inf"),
        vocab_size=VOCABULARY,
        seed=seed,
    )
    planned = plan_requests(workload)
    async with open_client(settings) as client:
        await warm_up(client, with_other_prompts(planned, VOCABULARY, f"warm-up {seed}"), settings)
        return await send_all(client, planned, settings, timeout_s=settings.timeout_s)


def take_turns(cases: dict[str, Case], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Send all cases in turn, several times, each each with prompts of its own."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for seed, (_, (name, case)) in enumerate(itertools.product(range(rounds), cases.items())):
        found[name].append(send(case, seed=seed))
        sys.stderr.write(f"{name}: {found[name][-1]['output_tokens_per_s']:.1f} tokens/s\n")
    return found


def rates(figures: Sequence[dict[str, Any]]) -> list[float]:
    """Return the output tokens per second of each round."""
    return [round(one["output_tokens_per_s"], 1) for one in figures]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """Times of requests that nobody shares the server with, milliseconds, medians."""

    ttft_ms: dict[str, float]
    """Base, adapter, and `forward`: the bare model in transformers."""
    tpot_ms: dict[str, float]


def measure_alone(url: str, adapter: str, folder: Path, repeats: int) -> Alone:
    """Send single requests for base and adapter in turn with the bare model's forward pass."""
    forward = _bare_forward(folder)
    ttft: dict[str, list[float]] = {BASE: [], "adapter": [], "forward": []}
    tpot: dict[str, list[float]] = {BASE: [], "adapter": []}
    for seed in range(repeats + 1):
        forward_ms = forward()
        for name, model in ((BASE, BASE), ("adapter", adapter)):
            case = Case(url=url, models=(model,), num_prompts=1)
            figures = send(case, seed=1000 + 2 * seed + (name == BASE))
            if seed:  # the first round warms up
                ttft[name].append(figures["ttft_ms"]["p50"])
                tpot[name].append(figures["tpot_ms"]["p50"])
        if seed:
            ttft["forward"].append(forward_ms)
    return Alone(
        ttft_ms={name: statistics.median(values) for name, values in ttft.items()},
        tpot_ms={name: statistics.median(values) for name, values in tpot.items()},
    )


def _bare_forward(folder: Path) -> Callable[[], float]:
    """Return what runs a prompt through transformers' model and returns its milliseconds."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    prompt = torch.arange(PROMPT_TOKENS).unsqueeze(0) + 300

    def run() -> float:
        with torch.inference_mode():
            model(input_ids=prompt, use_cache=False, logits_to_keep=1)
            start_s = time.perf_counter()
            model(input_ids=prompt, use_cache=False, logits_to_keep=1)
            return (time.perf_counter() - start_s) * 1e3

    return run


def start_seconds(
    arguments: Sequence[str], log: Path, repeats: int, *, variables: Sequence[str] = ()
) -> list[float]:
    """Start a server several times; return the seconds of each start."""
    found = []
    for _ in range(repeats):
        with started(arguments, log, variables=variables) as server:
            found.append(round(server.seconds, 2))
    return found


def run_seconds(arguments: Sequence[str], repeats: int) -> list[float]:
    """Run a command several times; return the seconds of each run."""
    found = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
        found.append(round(time.perf_counter() - start_s, 3))
    return found
