"""Clients that all do everything at once, and the notes by which every reply is judged.

A reply is right when its tokens are those of the version that its header names. A refusal is right
only when the name was removed at some moment while the request was under way.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import httpx

from support.server import BASE_NAME

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from support.fleet import Fleet
    from support.oracle import Choice

PROMPTS = (tuple(range(20, 60, 3)), tuple(range(30, 130, 3)))
NUM_TOKENS = 12
"""Length of the answers that are compared."""
LONG = 150
"""Length that a stream asks for whose client will leave."""
MAX_PINS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back for one completion."""

    asked: str
    """Adapter name, the base's name, or the names of a weighted set."""
    choice: Choice
    """For a base request or a weighted set: what must have answered."""
    prompt: int
    label: str
    """The header that says what answered."""
    token_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Span:
    """When a name was removed, or might have been."""

    start_s: float
    end_s: float = float("inf")


@dataclass(slots=True, kw_only=True)
class Storm:
    """State that the clients share."""

    url: str
    fleet: Fleet
    stable: frozenset[str]
    """Names that nobody changes: weighted sets are made of them."""
    sets: Sequence[tuple[tuple[str, float], ...]]
    seconds: float
    replies: list[Reply] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    """How often each kind of thing was done."""
    refused: int = 0
    """Completions that were refused because their name was removed."""
    _version: dict[str, int] = field(default_factory=dict)
    _removed: dict[str, list[Span]] = field(default_factory=dict)
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict)
    _pinned: set[str] = field(default_factory=set)

    async def run(self, num_clients: int) -> None:
        """Let the clients work until the time is over."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=60, limits=limits) as client:
            end_s = time.monotonic() + self.seconds
            await asyncio.gather(
                *(self._work(client, random.Random(seed), end_s) for seed in range(num_clients))
            )

    async def _work(self, client: httpx.AsyncClient, chance: random.Random, end_s: float) -> None:
        kinds: dict[Callable[[httpx.AsyncClient, random.Random], Awaitable[None]], int] = {
            self._complete: 44,
            self._stream: 22,
            self._leave: 10,
            self._update: 8,
            self._unload_and_load: 6,
            self._pin_or_unpin: 6,
            self._list: 4,
        }
        while time.monotonic() < end_s:
            (act,) = chance.choices(list(kinds), list(kinds.values()))
            try:
                await act(client, chance)
            except (httpx.HTTPError, KeyError, ValueError) as error:
                self.problems.append(f"{act.__name__}: {type(error).__name__}: {error}")
            self.done[act.__name__.strip("_")] += 1

    # Requests.

    def _choose(self, chance: random.Random) -> tuple[dict[str, Any], str, Choice]:
        """Return the body's part that chooses, what was asked, and what must answer if known."""
        kind = chance.random()
        if kind < 0.1:
            return {"model": BASE_NAME}, BASE_NAME, None
        if kind < 0.2:
            chosen = chance.choice(self.sets)
            members = [{"name": name, "scale": scale} for name, scale in chosen]
            choice = tuple((self.fleet.versions[n][0].key, scale) for n, scale in chosen)
            return {"model": BASE_NAME, "lora": members}, ",".join(n for n, _ in chosen), choice
        # A few names are asked for far more often than the others.
        names = self.fleet.names
        name = names[min(int(chance.expovariate(1 / 16)), len(names) - 1)]
        return {"model": name}, name, name

    def _body(
        self, chance: random.Random, **fields: Any
    ) -> tuple[dict[str, Any], str, Choice, int]:
        selection, asked, choice = self._choose(chance)
        prompt = chance.randrange(len(PROMPTS))
        body = {
            **selection,
            "prompt": list(PROMPTS[prompt]),
            "max_tokens": chance.randint(1, NUM_TOKENS),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        return body, asked, choice, prompt

    async def _complete(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        body, asked, choice, prompt = self._body(chance)
        start_s = time.monotonic()
        reply = await client.post("/v1/completions", json=body)
        if self._is_refused(reply, asked, start_s):
            return
        token_ids = tuple(reply.json()["choices"][0]["token_ids"])
        if len(token_ids) != body["max_tokens"]:
            self.problems.append(f"{asked}: {len(token_ids)} tokens of {body['max_tokens']}")
        self._keep(asked, choice, prompt, reply, token_ids)

    async def _stream(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        body, asked, choice, prompt = self._body(chance, stream=True)
        await self._follow(client, body, asked, choice, prompt, num_chunks=LONG)

    async def _leave(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        body, asked, choice, prompt = self._body(chance, stream=True, max_tokens=LONG)
        await self._follow(client, body, asked, choice, prompt, num_chunks=chance.randint(1, 8))

    async def _follow(
        self,
        client: httpx.AsyncClient,
        body: dict[str, Any],
        asked: str,
        choice: Choice,
        prompt: int,
        *,
        num_chunks: int,
    ) -> None:
        """Read a stream, or its first chunks."""
        start_s = time.monotonic()
        token_ids: list[int] = []
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != httpx.codes.OK:
                await reply.aread()
            if self._is_refused(reply, asked, start_s):
                return
            # It is a generator, which has to be closed before the reply is.
            open_lines = cast("AsyncGenerator[str]", reply.aiter_lines())
            async with aclosing(open_lines) as lines:
                async for line in lines:
                    if not line.startswith("data: {"):
                        continue
                    content = json.loads(line.removeprefix("data: "))
                    if "error" in content:
                        self.problems.append(f"{asked}: {content['error']}")
                        return
                    token_ids += [t for c in content["choices"] for t in c["token_ids"]]
                    num_chunks -= 1
                    if num_chunks <= 0:
                        break
        self._keep(asked, choice, prompt, reply, tuple(token_ids))

    def _keep(
        self,
        asked: str,
        choice: Choice,
        prompt: int,
        reply: httpx.Response,
        token_ids: tuple[int, ...],
    ) -> None:
        label = reply.headers["X-LoRA-Adapter"]
        self.replies.append(
            Reply(asked=asked, choice=choice, prompt=prompt, label=label, token_ids=token_ids)
        )

    def _is_refused(self, reply: httpx.Response, asked: str, start_s: float) -> bool:
        if reply.status_code == httpx.codes.OK:
            return False
        code = reply.json()["error"]["code"]
        is_removed = any(span.end_s >= start_s for span in self._removed.get(asked, ()))
        if reply.status_code == httpx.codes.NOT_FOUND and code == "model_not_found" and is_removed:
            self.refused += 1
        else:
            self.problems.append(f"{asked}: {reply.status_code} {reply.text}")
        return True

    # Management.

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _changing(self, chance: random.Random) -> str:
        return chance.choice([name for name in self.fleet.names if name not in self.stable])

    async def _update(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        """Replace a version in place; now and then with a stale compare, which is refused."""
        name = self._changing(chance)
        versions = self.fleet.versions[name]
        async with self._lock(name):
            current = self._version.get(name, 0)
            new = (current + 1) % len(versions)
            is_stale = chance.random() < 0.1
            expected = "0" * 64 if is_stale else versions[current].digest
            reply = await self._load(client, name, new, load_inplace=True, expected_digest=expected)
            if reply.status_code != (409 if is_stale else 200):
                self.problems.append(f"update of {name}: {reply.status_code} {reply.text}")
            elif not is_stale:
                self._version[name] = new
                # Equal content is the same version, whose pin stays.
                if not reply.json()["lora"]["pinned"]:
                    self._pinned.discard(name)

    async def _unload_and_load(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        name = self._changing(chance)
        async with self._lock(name):
            span = Span(start_s=time.monotonic())
            self._removed.setdefault(name, []).append(span)
            replies = [await client.post("/v1/unload_lora_adapter", json={"lora_name": name})]
            await asyncio.sleep(chance.random() * 0.05)
            replies.append(await self._load(client, name, self._version.get(name, 0)))
            span.end_s = time.monotonic()
            self._pinned.discard(name)
            self.problems += [
                f"unload and load of {name}: {reply.status_code} {reply.text}"
                for reply in replies
                if reply.status_code != httpx.codes.OK
            ]

    async def _load(
        self, client: httpx.AsyncClient, name: str, version: int, **fields: Any
    ) -> httpx.Response:
        path = str(self.fleet.versions[name][version].path)
        content = {"lora_name": name, "lora_path": path, **fields}
        return await client.post("/v1/load_lora_adapter", json=content)

    async def _pin_or_unpin(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        name = self._changing(chance)
        if self._pinned and (len(self._pinned) >= MAX_PINS or chance.random() < 0.5):
            name = chance.choice(sorted(self._pinned))
        verb = "unpin" if name in self._pinned else "pin"
        async with self._lock(name):
            if verb == "pin":
                if len(self._pinned) >= MAX_PINS:
                    return
                self._pinned.add(name)
            reply = await client.post(f"/v1/adapters/{name}/{verb}")
            card = reply.json()
            if verb == "unpin":
                self._pinned.discard(name)
            if reply.status_code != httpx.codes.OK or card["lora"]["pinned"] != (verb == "pin"):
                self.problems.append(f"{verb} of {name}: {reply.status_code} {reply.text}")

    async def _list(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        route = chance.choice(("/v1/models", "/v1/adapters", "/metrics"))
        (await client.get(route)).raise_for_status()


def judge(storm: Storm) -> list[str]:
    """Compare every reply with PEFT's answer of the version that its header names."""
    versions = storm.fleet.by_digest()
    wrong = []
    for reply in storm.replies:
        choice = reply.choice
        names = [label.split("@")[0] for label in reply.label.split(",")]
        if isinstance(choice, str):
            version = versions[reply.label.split("@")[1]]
            choice = version.key
            names = [version.name]
        asked = "base" if reply.asked == BASE_NAME else reply.asked
        if ",".join(names) != asked:
            wrong.append(f"asked for {reply.asked}, answered by {reply.label}")
            continue
        expected = storm.fleet.clear_answer(choice, PROMPTS[reply.prompt], NUM_TOKENS)
        num_compared = min(len(expected), len(reply.token_ids))
        if reply.token_ids[:num_compared] != expected[:num_compared]:
            wrong.append(f"{reply.label}: {reply.token_ids}, expected {expected}")
    return wrong
