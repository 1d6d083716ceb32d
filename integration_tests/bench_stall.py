"""How much a running stream notices of a 200 MB adapter that is loaded beside it.

`python integration_tests/bench_stall.py [--output FILE] [--cycles N]` starts a server of its own
over a wide random model, reads one long stream token by token, and in turn leaves it alone or has
an adapter of 200 MB read from the disk, written into a slot (it is pinned), and unloaded. Prints
the gaps between tokens in both kinds of time, and their ratio. A measurement, not a test.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx

sys.path.insert(0, str(Path(__file__).parent))

from support.machine import machine
from support.server import BASE_NAME, running
from support.wide import BYTES_PER_RANK, save_wide_adapter, save_wide_model

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

ADAPTER_BYTES = 200 * 10**6
RANK = -(-ADAPTER_BYTES // BYTES_PER_RANK)
SETTLE_S = 0.5
"""Left out after each change, so that a gap belongs to one kind of time only."""
LIMIT = 1.3


@dataclass(slots=True, kw_only=True)
class Watch:
    """Gaps between tokens, under what was going on when they ended."""

    phase: str = "warm-up"
    gaps_ms: dict[str, list[float]] = field(default_factory=dict)
    is_over: bool = False

    def is_finished(self) -> bool:
        """Whether nobody looks any more."""
        return self.is_over

    def note(self, gap_s: float) -> None:
        """Keep one gap."""
        self.gaps_ms.setdefault(self.phase, []).append(gap_s * 1e3)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the usual figures of gaps in milliseconds."""
    cuts = statistics.quantiles(values, n=100)
    named = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(values)}
    return {"count": len(values), **{name: round(value, 2) for name, value in named.items()}}


async def watch_stream(client: httpx.AsyncClient, watch: Watch) -> None:
    """Read streams of the base, one after another, until it is over."""
    while not watch.is_finished():
        body = {
            "model": BASE_NAME,
            "prompt": list(range(20, 52)),
            "max_tokens": 3000,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            # One event a token: without them a token that ends inside a character has no event.
            "logprobs": 1,
        }
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            lines = cast("AsyncGenerator[str]", reply.aiter_lines())
            async with aclosing(lines):
                last_s = 0.0
                async for line in lines:
                    if not line.startswith("data: {"):
                        continue
                    now_s = time.perf_counter()
                    if last_s:
                        watch.note(now_s - last_s)
                    last_s = now_s
                    if watch.is_finished():
                        return


async def load_and_unload(client: httpx.AsyncClient, adapter: Path) -> float:
    """Load and pin the adapter, then unload it; return the seconds of the load."""
    start_s = time.perf_counter()
    content = {"lora_name": "large", "lora_path": str(adapter), "pinned": True}
    (await client.post("/v1/load_lora_adapter", json=content)).raise_for_status()
    took_s = time.perf_counter() - start_s
    name = {"lora_name": "large"}
    (await client.post("/v1/unload_lora_adapter", json=name)).raise_for_status()
    return took_s


async def measure(url: str, adapter: Path, cycles: int) -> dict[str, Any]:
    """Alternate between quiet times and loads, equally long."""
    watch = Watch()
    loads_s: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        stream = asyncio.create_task(watch_stream(client, watch))
        await asyncio.sleep(3.0)
        await load_and_unload(client, adapter)
        for _ in range(cycles):
            watch.phase = "load"
            loads_s.append(await load_and_unload(client, adapter))
            await asyncio.sleep(SETTLE_S)
            watch.phase = "left out"
            await asyncio.sleep(SETTLE_S)
            watch.phase = "quiet"
            await asyncio.sleep(loads_s[-1] + SETTLE_S)
        watch.is_over = True
        await stream
    load, quiet = (quantiles(watch.gaps_ms[phase]) for phase in ("load", "quiet"))
    ratios = {name: round(load[name] / quiet[name], 3) for name in ("p50", "p90", "p99", "max")}
    return {"load_s": [round(s, 2) for s in loads_s], "load": load, "quiet": quiet, "ratio": ratios}


def main() -> int:
    """Measure, print JSON, and say whether the limit holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the report here as well")
    parser.add_argument("--cycles", type=int, default=12, help="loads to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_wide_model(folder / "base")
        adapter_bytes = save_wide_adapter(folder / "large", rank=RANK, seed=1)
        flags = ["serve", str(folder / "base"), "--served-model-name", BASE_NAME, "--port", "0"]
        flags += ["--max-loras", "2", "--max-cpu-loras", "2", "--max-lora-rank", str(RANK)]
        flags += ["--kv-cache-memory", "1GiB", "--adapter-root", name, "--dtype", "float32"]
        with running(flags, folder / "log") as server:
            found = asyncio.run(measure(server.url, folder / "large", options.cycles))
    report = {"adapter_bytes": adapter_bytes, "rank": RANK, **found, "machine": machine()}
    text = json.dumps(report, indent=1)
    sys.stdout.write(text + "\n")
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0 if report["ratio"]["p99"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
