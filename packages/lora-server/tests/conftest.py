"""A service around a real tokenizer, with a scripted engine at its Protocol border."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lora_server.engine.messages import EngineOutput, FinishReason, SequenceOutput, TokenLogprob
from lora_server.engine.request import GenerationRequest
from lora_server.errors import (
    AdapterAlreadyLoadedError,
    AdapterNotLoadedError,
    ModelNotFoundError,
)
from lora_server.http.app import create_app
from lora_server.http.service import Phase, Readiness, Service
from lora_server.http.text import TextProcessor
from lora_server.metrics import CacheSnapshot, ServerMetrics

if TYPE_CHECKING:
    from fastapi import FastAPI

    from lora_server.effect import AdapterEffect

CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)

Script = Callable[[GenerationRequest], Sequence[EngineOutput | Exception]]


@pytest.fixture(scope="session", autouse=True)
def signals_reach_children() -> Iterator[None]:
    """Let tests send signals even where the run itself was started with them ignored.

    A process started by `nohup`, or in the background of a script, ignores SIGHUP or SIGINT, and
    so do its children.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if before[signal.SIGINT] is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def build_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer on a sentence; it knows every byte and a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, the cat sat on the mat."] * 4, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        chat_template=chat_template,
    )


@dataclass(kw_only=True)
class Stats:
    """A moment of the engine."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_slot: int = 0
    num_waiting_for_load: int = 0
    kv_blocks_total: int = 10
    kv_block_size: int = 16
    kv_blocks_used: int = 0
    kv_blocks_kept: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    generated_tokens: int = 0
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    slots_total: int = 2
    slots_used: int = 0
    cache: CacheSnapshot | None = None


class ScriptedEngine:
    """Plays a script for each request and notes when its iterator ends.

    After the script's last output it hangs, as an engine does that is not done, unless the
    script has ended the request.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[GenerationRequest] = []
        self.ended: list[str] = []
        self.num_sent = 0
        self.stats = Stats()
        self.on_hang: Callable[[], None] = lambda: None

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        self.requests.append(request)
        num_open = request.n
        try:
            for item in self.script(request):
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, SequenceOutput) and item.finish_reason is not None:
                    num_open -= 1
                self.num_sent += 1
                yield item
            if num_open:
                self.on_hang()
                await asyncio.Event().wait()
        finally:
            self.ended.append(request.request_id)

    def snapshot(self) -> Stats:
        return self.stats


@dataclass(frozen=True, kw_only=True)
class Card:
    """What the catalog tells of an adapter."""

    name: str
    digest: str
    path: str = "/adapters/x"
    parent: str = "base-model"
    rank: int = 8
    residency: str = "host"
    pinned: bool = False
    size_bytes: int = 1024
    created_s: float = 1_700_000_000.5
    hits: int = 0
    waiting: int = 0
    running: int = 0
    effect: AdapterEffect | None = None
    is_linear: bool = True


class Catalog:
    """Names and cards in a dict."""

    def __init__(self, *names: str) -> None:
        self.base_names = ("base-model", "alias")
        self.by_name = {name: Card(name=name, digest=digest_of(name)) for name in names}
        self.held: list[str] = []

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.base_names, *self.by_name)

    def is_base(self, name: str) -> bool:
        return name in self.base_names

    def resolve(self, name: str) -> Card:
        if name not in self.by_name:
            raise ModelNotFoundError(name, (*self.base_names, *self.by_name))
        return self.by_name[name]

    @contextmanager
    def hold(self, digests: Iterable[str]) -> Iterator[None]:
        digests = list(digests)
        self.held += digests
        try:
            yield
        finally:
            for digest in digests:
                self.held.remove(digest)

    async def load(
        self,
        *,
        name: str,
        path: str,
        load_inplace: bool = False,
        pinned: bool = False,
        expected_digest: str | None = None,
        check: Callable[[str], Awaitable[None]] | None = None,
    ) -> Card:
        if name in self.by_name and not load_inplace:
            raise AdapterAlreadyLoadedError(f"adapter {name!r} is already loaded")
        digest = expected_digest or digest_of(name)
        if check is not None:
            await check(digest)
        self.by_name[name] = Card(name=name, digest=digest, path=path, pinned=pinned)
        return self.by_name[name]

    async def unload(self, name: str) -> None:
        await self.card(name)
        del self.by_name[name]

    async def pin(self, name: str) -> Card:
        return await self._set_pinned(name, pinned=True)

    async def unpin(self, name: str) -> Card:
        return await self._set_pinned(name, pinned=False)

    async def _set_pinned(self, name: str, *, pinned: bool) -> Card:
        self.by_name[name] = replace(await self.card(name), pinned=pinned)
        return self.by_name[name]

    async def cards(self) -> list[Card]:
        return list(self.by_name.values())

    async def card(self, name: str) -> Card:
        if name not in self.by_name:
            raise AdapterNotLoadedError(name, list(self.by_name))
        return self.by_name[name]


def digest_of(name: str) -> str:
    """Return a digest of 64 characters that shows the name."""
    return name.encode().hex().ljust(64, "0")[:64]


@dataclass
class Harness:
    """A running app without a network, and everything behind it."""

    service: Service
    engine: ScriptedEngine
    catalog: Catalog
    tokenizer: PreTrainedTokenizerFast
    app: FastAPI = field(init=False)

    def __post_init__(self) -> None:
        self.app = create_app(self.service)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send one request and return the whole reply."""

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await asyncio.wait_for(client.request(method, path, **options), 10)

        return asyncio.run(send())

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def ids(self, text: str) -> tuple[int, ...]:
        ids: list[int] = self.tokenizer.backend_tokenizer.encode(text).ids
        return tuple(ids)

    def events(self, response: httpx.Response) -> list[Any]:
        """Return the JSON of a stream's events; the last one must be the end mark."""
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = [line for line in response.text.split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def error(self, response: httpx.Response) -> dict[str, Any]:
        """Return a refusal, which must have the one shape."""
        body = response.json()
        assert list(body) == ["error"]
        error: dict[str, Any] = body["error"]
        assert {"message", "type", "param", "code"} <= error.keys()
        return error

    def leave(
        self,
        path: str,
        body: Any,
        *,
        after_chunks: int | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> list[Any]:
        """Send a request and leave after some chunks, or when the engine's script is over."""
        sent: list[Any] = []
        gone = asyncio.Event()
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            num_chunks = sum(bool(m.get("body")) for m in sent)
            if after_chunks is not None and num_chunks >= after_chunks:
                gone.set()

        if after_chunks is None:
            self.engine.on_hang = gone.set
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
            "headers": [(b"content-type", b"application/json"), *headers],
        }
        asyncio.run(asyncio.wait_for(self.app(scope, receive, send), 10))
        return sent

    def spell(
        self, request: GenerationRequest, index: int, text: str, **options: Any
    ) -> list[SequenceOutput]:
        """Return one continuation as the engine sends it, a token a message."""
        return spell(request, index, self.ids(text), **options)

    def says(self, *texts: str, **options: Any) -> None:
        """Let the engine answer continuation i with `texts[i]`, a token a message."""
        answers = [self.ids(text) for text in texts]
        self.engine.script = lambda request: [
            output
            for index in range(request.n)
            for output in spell(request, index, answers[index % len(answers)], **options)
        ]


def spell(
    request: GenerationRequest,
    index: int,
    token_ids: Sequence[int],
    *,
    finish: FinishReason | None = FinishReason.LENGTH,
    stop_token_id: int | None = None,
    cached: int = 0,
) -> list[SequenceOutput]:
    """Return one continuation as the engine sends it, log-probabilities included if asked for."""
    ids = [*token_ids, *([] if stop_token_id is None else [stop_token_id])]
    wanted = request.sampling.logprobs
    return [
        SequenceOutput(
            request_id=request.request_id,
            index=index,
            token_ids=(token_id,),
            logprobs=() if wanted is None else (logprob_of(token_id, position, wanted),),
            finish_reason=finish if position == len(ids) - 1 else None,
            stop_token_id=stop_token_id if position == len(ids) - 1 else None,
            num_cached_tokens=cached,
        )
        for position, token_id in enumerate(ids)
    ]


def logprob_of(token_id: int, position: int, num_top: int) -> TokenLogprob:
    """Return a log-probability that tells the position; the alternatives are the next tokens."""
    top = tuple((token_id + i, -0.5 - position - i) for i in range(num_top))
    return TokenLogprob(token_id=token_id, logprob=-0.5 - position, rank=1, top=top)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def make_harness(tokenizer: PreTrainedTokenizerFast) -> Callable[..., Harness]:
    """Return a function that builds a service; its keywords replace fields of `Service`."""

    def make(**fields: Any) -> Harness:
        engine = ScriptedEngine(lambda _: [])
        catalog = Catalog("sql", "Legal")
        defaults: dict[str, Any] = {
            "engine": engine,
            "catalog": catalog,
            "text": TextProcessor(tokenizer),
            "max_model_len": 64,
            "vocab_size": 400,
            "max_loras": 2,
            "model_path": "/models/base",
            "created_s": 1_600_000_000.0,
            "version": "9.9",
            "metrics": ServerMetrics(),
            "readiness": Readiness(Phase.READY),
            "now": lambda: 1_700_000_000.0,
        }
        service = Service(**(defaults | fields))
        return Harness(service, engine, catalog, tokenizer)

    return make


@pytest.fixture
def harness(make_harness: Callable[..., Harness]) -> Harness:
    harness = make_harness()
    harness.says("hello world")
    return harness
