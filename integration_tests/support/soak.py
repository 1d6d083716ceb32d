"""Full load for as long as one likes, while adapters come, change and go every second.

Every answer is compared at once with PEFT's for the version that its header names, so that hours
of it need no more memory here than minutes.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from support.server import BASE_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from support.fleet import Fleet

PROMPTS = (tuple(range(20, 60, 3)), tuple(range(30, 130, 3)))
NUM_TOKENS = 12
_PERIOD_S = 1.0
_TIMEOUT_S = 60.0
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The server's memory at one moment."""

    time_s: float
    """From the start."""
    resident_bytes: int


@dataclass(slots=True, kw_only=True)
class Soak:
    """One run and what came of it."""

    url: str
    pid: int
    fleet: Fleet
    seconds: float
    problems: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    """How often each kind of thing was done; `tokens` is what was generated."""
    waits_s: list[float] = field(default_factory=list)
    """Durations of management calls."""
    samples: list[Sample] = field(default_factory=list)
    _answers: dict[tuple[str | None, int], tuple[int, ...]] = field(default_factory=dict)
    _start_s: float = 0.0

    async def run(self, num_clients: int) -> None:
        """Let the clients work until the time is over."""
        self._prepare()
        self._start_s = time.monotonic()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=_TIMEOUT_S, limits=limits
        ) as client:
            await asyncio.gather(
                self._manage(client),
                *(self._ask(client, random.Random(seed)) for seed in range(num_clients)),
            )

    def _prepare(self) -> None:
        """Compute every answer before there is any load."""
        every = [v.key for versions in self.fleet.versions.values() for v in versions]
        for choice in (None, *every):
            for number, prompt in enumerate(PROMPTS):
                answer = self.fleet.clear_answer(choice, prompt, NUM_TOKENS)
                self._answers[choice, number] = answer

    @property
    def _time_s(self) -> float:
        return time.monotonic() - self._start_s

    async def _ask(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        names = [BASE_NAME, *self.fleet.names]
        while self._time_s < self.seconds:
            await self._complete(client, chance.choice(names), chance)

    async def _complete(self, client: httpx.AsyncClient, name: str, chance: random.Random) -> None:
        number, is_stream = chance.randrange(len(PROMPTS)), chance.random() < 0.5
        body = {
            "model": name,
            "prompt": list(PROMPTS[number]),
            "max_tokens": chance.randint(1, NUM_TOKENS),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": is_stream,
        }
        try:
            reply = await client.post("/v1/completions", json=body)
            reply.raise_for_status()
            tokens = _streamed(reply.text) if is_stream else _tokens([reply.json()])
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self.problems.append(f"{name}: {type(error).__name__}: {error}")
            return
        self.done["streams" if is_stream else "completions"] += 1
        self.done["tokens"] += len(tokens)
        self._judge(reply.headers["X-LoRA-Adapter"], number, tokens, body["max_tokens"])

    def _judge(self, label: str, number: int, tokens: Sequence[int], count: Any) -> None:
        """Compare an answer with that of the version which the server says it is from."""
        _, _, digest = label.partition("@")
        choice = self.fleet.by_digest()[digest].key if digest else None
        expected = self._answers[choice, number]
        compared = min(len(expected), len(tokens))
        if len(tokens) != count or tuple(tokens[:compared]) != expected[:compared]:
            self.problems.append(f"{label}: {tokens}, expected {count} of {expected}")

    async def _manage(self, client: httpx.AsyncClient) -> None:
        """Load, use and unload a new name each second, and replace the version of an old one."""
        chance = random.Random(99)
        current = dict.fromkeys(self.fleet.names, 0)
        for turn in range(int(self.seconds / _PERIOD_S)):
            await asyncio.sleep(max(turn * _PERIOD_S - self._time_s, 0))
            self._sample()
            fresh, source = f"fresh-{turn}", chance.choice(self.fleet.names)
            version = chance.choice(self.fleet.versions[source])
            await self._call(client, "load", {"lora_name": fresh, "lora_path": str(version.path)})
            await self._complete(client, fresh, chance)
            name = chance.choice(self.fleet.names)
            versions = self.fleet.versions[name]
            current[name] = (current[name] + 1) % len(versions)
            path = str(versions[current[name]].path)
            update = {"lora_name": name, "lora_path": path, "load_inplace": True}
            await self._call(client, "load", update, kind="updates")
            await self._call(client, "unload", {"lora_name": fresh})
        self._sample()

    async def _call(
        self,
        client: httpx.AsyncClient,
        what: str,
        body: Mapping[str, Any],
        *,
        kind: str | None = None,
    ) -> None:
        start_s = time.monotonic()
        try:
            reply = await client.post(f"/v1/{what}_lora_adapter", json=dict(body))
            reply.raise_for_status()
        except httpx.HTTPError as error:
            self.problems.append(f"{what} {body['lora_name']}: {type(error).__name__}: {error}")
            return
        self.waits_s.append(time.monotonic() - start_s)
        self.done[kind or f"{what}s"] += 1

    def _sample(self) -> None:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        self.samples.append(Sample(time_s=self._time_s, resident_bytes=pages * _PAGE_BYTES))

    # What came of it.

    @property
    def steady(self) -> list[Sample]:
        """The samples after the first third, in which caches fill and the allocator settles."""
        return self.samples[len(self.samples) // 3 :]

    @property
    def growth_bytes_per_s(self) -> float:
        """Least squares' slope of the memory, once it is steady."""
        samples = self.steady
        mean_s = sum(s.time_s for s in samples) / len(samples)
        mean = sum(s.resident_bytes for s in samples) / len(samples)
        above = sum((s.time_s - mean_s) * (s.resident_bytes - mean) for s in samples)
        return above / sum((s.time_s - mean_s) ** 2 for s in samples)

    def figures(self) -> dict[str, float]:
        """Return what is worth telling."""
        waits = sorted(self.waits_s)
        mib = 2**20
        return {
            "seconds": round(self.samples[-1].time_s, 1),
            **self.done,
            "problems": len(self.problems),
            "tokens_per_s": round(self.done["tokens"] / self.samples[-1].time_s, 1),
            "management_p50_ms": round(waits[len(waits) // 2] * 1e3, 1),
            "management_p99_ms": round(waits[len(waits) * 99 // 100] * 1e3, 1),
            "resident_first_mib": round(self.samples[0].resident_bytes / mib, 1),
            "resident_steady_mib": round(self.steady[0].resident_bytes / mib, 1),
            "resident_last_mib": round(self.samples[-1].resident_bytes / mib, 1),
            "growth_kib_per_s": round(self.growth_bytes_per_s / 1024, 2),
        }


def _streamed(text: str) -> list[int]:
    """Return the tokens of a stream, which must have its end mark."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    if lines[-1] != "[DONE]":
        raise ValueError(f"the stream ends with {lines[-1][:200]}")
    return _tokens([json.loads(line) for line in lines[:-1]])


def _tokens(parts: Sequence[Mapping[str, Any]]) -> list[int]:
    return [token for part in parts for token in part["choices"][0]["token_ids"]]
