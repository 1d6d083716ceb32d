"""What it costs to have half as many slots as hot adapters: time to the first token.

`python integration_tests/bench_slots.py [--output FILE] [--rounds N]` serves eight adapters over a
wide random model once with eight slots and once with four, and asks both servers in turn for the
same requests: 16 at a time, adapters by equal chance. Prints the times to the first token of both
and the ratio of their medians. A measurement, not a test.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx

sys.path.insert(0, str(Path(__file__).parent))

from support.machine import machine
from support.server import BASE_NAME, running
from support.wide import save_wide_adapter, save_wide_model

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

NUM_ADAPTERS, RANK = 8, 16
CONCURRENCY = 16
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32
LIMIT = 5.0


async def time_to_first_token(
    client: httpx.AsyncClient, name: str, chance: random.Random
) -> tuple[float, int]:
    """Send one request and read it to its end; return when its first token came, and how many did.

    Lengths differ, so that requests do not all end and begin in the same steps.
    """
    body = {
        "model": name,
        "prompt": chance.choices(range(10, 250), k=PROMPT_TOKENS),
        "max_tokens": chance.randint(OUTPUT_TOKENS // 2, OUTPUT_TOKENS * 3 // 2),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    start_s = time.perf_counter()
    first_s, num_tokens = 0.0, 0
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        lines = cast("AsyncGenerator[str]", reply.aiter_lines())
        async with aclosing(lines):
            async for line in lines:
                if line.startswith("data: {"):
                    num_tokens += 1
                    first_s = first_s or time.perf_counter() - start_s
    return first_s, num_tokens


async def run_round(url: str, *, num_requests: int, seed: int) -> dict[str, Any]:
    """Keep `CONCURRENCY` requests under way until all are answered."""
    chance = random.Random(seed)
    names = [f"a{chance.randrange(NUM_ADAPTERS)}" for _ in range(num_requests)]
    todo = iter(names)
    found: list[float] = []
    num_tokens = 0
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def work() -> None:
            nonlocal num_tokens
            for name in todo:
                seconds, count = await time_to_first_token(client, name, chance)
                found.append(seconds)
                num_tokens += count

        start_s = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
        took_s = time.perf_counter() - start_s
    return {"ttft_s": found, "output_tokens_per_s": num_tokens / took_s}


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return median, mean and tail of all rounds' first tokens, and the throughput."""
    times = [seconds * 1e3 for one in rounds for seconds in one["ttft_s"]]
    rates = [one["output_tokens_per_s"] for one in rounds]
    return {
        "ttft_ms": {
            "p50": round(statistics.median(times)),
            "mean": round(statistics.fmean(times)),
            "p99": round(statistics.quantiles(times, n=100)[98]),
        },
        "output_tokens_per_s": [round(rate, 1) for rate in rates],
    }


def main() -> int:
    """Measure, print JSON, and say whether the limit holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the report here as well")
    parser.add_argument("--rounds", type=int, default=3, help="rounds on each server")
    parser.add_argument("--num-requests", type=int, default=96, help="requests of a round")
    parser.add_argument("--max-adapter-wait", default="2.0", help="passed to the servers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_wide_model(folder / "base")
        modules = []
        for i in range(NUM_ADAPTERS):
            save_wide_adapter(folder / f"a{i}", rank=RANK, seed=i)
            modules.append(f"a{i}={folder / f'a{i}'}")
        shared = ["serve", str(folder / "base"), "--served-model-name", BASE_NAME, "--port", "0"]
        shared += ["--lora-modules", *modules, "--max-lora-rank", str(RANK), "--dtype", "float32"]
        shared += ["--kv-cache-memory", "1GiB", "--max-adapter-wait", options.max_adapter_wait]
        rounds: dict[int, list[dict[str, Any]]] = {NUM_ADAPTERS: [], NUM_ADAPTERS // 2: []}
        for seed in range(options.rounds):
            for num_slots, found in rounds.items():
                flags = [*shared, "--max-loras", str(num_slots)]
                with running(flags, folder / "log") as server:
                    asyncio.run(run_round(server.url, num_requests=16, seed=99))
                    found.append(
                        asyncio.run(
                            run_round(server.url, num_requests=options.num_requests, seed=seed)
                        )
                    )
    enough, half = (summary(found) for found in rounds.values())
    report = {
        "adapters": NUM_ADAPTERS,
        "concurrency": CONCURRENCY,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "max_adapter_wait_s": float(options.max_adapter_wait),
        f"slots_{NUM_ADAPTERS}": enough,
        f"slots_{NUM_ADAPTERS // 2}": half,
        "ratio_of_median_ttft": round(half["ttft_ms"]["p50"] / enough["ttft_ms"]["p50"], 2),
        "machine": machine(),
    }
    text = json.dumps(report, indent=1)
    sys.stdout.write(text + "\n")
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0 if report["ratio_of_median_ttft"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
