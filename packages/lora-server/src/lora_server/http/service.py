"""What the HTTP layer needs from the rest of the service, as Protocols, and the bundle of it all.

Knows nothing of models, devices or files; the engine and the catalog of adapters are given.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from lora_server.effect import AdapterEffect
from lora_server.engine.messages import EngineOutput
from lora_server.engine.request import GenerationRequest
from lora_server.errors import NotReadyError
from lora_server.http.body_limit import BodyLimits
from lora_server.http.keys import ApiKeys
from lora_server.http.pooling_service import PoolingService
from lora_server.http.text import TextProcessor
from lora_server.ledger import AdapterLedger, MemoryLedger
from lora_server.metrics import EngineSnapshot, ServerMetrics
from lora_server.traces import Traces


class GenerationEngine(Protocol):
    """The engine, seen from the event loop's thread."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        """Start `request` at the first step of the iteration and yield what it produces.

        Closing the generator, or cancelling the task that awaits it, ends the request and frees
        its KV blocks and its lease. A failure arrives as `RequestFailed`, the last message.
        """
        ...

    def snapshot(self) -> EngineSnapshot:
        """Counts of this moment; does not wait for a step."""
        ...


class NamedAdapter(Protocol):
    """An adapter's name and the content it stands for now."""

    @property
    def name(self) -> str:
        """The caller's exact string."""
        ...

    @property
    def digest(self) -> str:
        """Content hash, hexadecimal."""
        ...


class AdapterEntry(NamedAdapter, Protocol):
    """What is known of an adapter when a request chooses it."""

    @property
    def is_linear(self) -> bool:
        """Whether it may be scaled, and be one of a weighted set."""
        ...


class AdapterCard(NamedAdapter, Protocol):
    """What is told about one adapter."""

    @property
    def path(self) -> str:
        """Where it was read from."""
        ...

    @property
    def parent(self) -> str:
        """Name of its base model."""
        ...

    @property
    def rank(self) -> int:
        """Largest rank over its modules."""
        ...

    @property
    def residency(self) -> str:
        """`device`, `host` or `disk`."""
        ...

    @property
    def pinned(self) -> bool:
        """Whether it is never evicted."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors in host memory."""
        ...

    @property
    def created_s(self) -> float:
        """When it was loaded, seconds since 1970."""
        ...

    @property
    def effect(self) -> AdapterEffect | None:
        """What it was shown to change; None when nobody has looked."""
        ...

    @property
    def hits(self) -> int:
        """Times it was needed and was in its slot already."""
        ...

    @property
    def waiting(self) -> int:
        """Sequences with it that wait to be admitted."""
        ...

    @property
    def running(self) -> int:
        """Sequences with it that are being generated."""
        ...


class Catalog(Protocol):
    """Names of the base model and of the adapters. Called from the event loop's thread."""

    @property
    def base_names(self) -> Sequence[str]:
        """Names of the base model, the first one first in replies."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """Names of the base model and of the adapters."""
        ...

    def is_base(self, name: str) -> bool:
        """Whether `name` is one of the base model's, exactly."""
        ...

    def resolve(self, name: str) -> AdapterEntry:
        """Return the adapter served under exactly this name, or raise `ModelNotFoundError`."""
        ...

    def hold(self, digests: Iterable[str]) -> AbstractContextManager[None]:
        """Keep versions from being freed while a request that chose them is unfinished."""
        ...

    async def load(
        self,
        *,
        name: str,
        path: str,
        load_inplace: bool = False,
        pinned: bool = False,
        expected_digest: str | None = None,
        check: Callable[[str], Awaitable[None]] | None = None,
    ) -> AdapterCard:
        """Load an adapter; when this returns, the next request is served by it.

        `check` is given the digest before the name stands for it; what it raises keeps the old
        version.
        """
        ...

    async def unload(self, name: str) -> None:
        """Forget the name at once; running requests finish. Raises `UnknownAdapterError`."""
        ...

    async def pin(self, name: str) -> AdapterCard:
        """Keep the adapter in its slot. Raises `UnknownAdapterError`."""
        ...

    async def unpin(self, name: str) -> AdapterCard:
        """Let the adapter be evicted again. Raises `UnknownAdapterError`."""
        ...

    async def cards(self) -> Sequence[AdapterCard]:
        """Return the cards of all adapters, in the order in which they were first loaded."""
        ...

    async def card(self, name: str) -> AdapterCard:
        """Return one adapter's card. Raises `UnknownAdapterError`."""
        ...


class MemoryMeter(Protocol):
    """Measures what the service takes of the memory."""

    def measure(self, adapters: Sequence[AdapterLedger]) -> MemoryLedger:
        """Return the ledger of this moment, with these adapters; blocks for about a step."""
        ...


class Phase(StrEnum):
    """Where the service is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Readiness:
    """The one switch that decides whether requests are taken; `/health` reports it."""

    def __init__(self, phase: Phase = Phase.STARTING) -> None:
        self.phase = phase
        self.num_running = 0
        """Requests that were taken and whose replies are not complete."""

    def check(self) -> None:
        """Raise `NotReadyError` unless requests are taken."""
        if self.phase is not Phase.READY:
            raise NotReadyError(f"the server is {self.phase.value}")

    @contextmanager
    def working(self) -> Iterator[None]:
        """Take a request and count it as running while the block lasts; else as `check`."""
        self.check()
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Everything the routes work with."""

    engine: GenerationEngine
    catalog: Catalog
    text: TextProcessor
    max_model_len: int
    """Longest sequence in tokens, prompt and output together."""
    vocab_size: int
    """Token ids are below this; the width of the model's output."""
    max_loras: int
    """Slots: the most adapters that one request may combine."""
    model_path: str
    """Where the base model was read from; the `root` of its card."""
    version: str
    """Version of this package."""
    metrics: ServerMetrics
    gate_file: Path | None = None
    """Baseline that updates in place must pass, for the names it holds."""
    pooling: PoolingService | None = None
    """What answers where the model does not generate; then `engine` only reports."""
    memory: MemoryMeter | None = None
    """What tells the memory ledger; None where there is nothing to measure."""
    readiness: Readiness = field(default_factory=Readiness)
    is_alive: Callable[[], bool] = lambda: True
    """Whether the engine's thread runs."""
    traces: Traces | None = None
    """Where spans go; None makes none."""
    keys: ApiKeys = field(default_factory=ApiKeys)
    body_limits: BodyLimits = field(default_factory=BodyLimits)
    created_s: float = field(default_factory=time.time)
    """When the base model was loaded, seconds since 1970."""
    clock: Callable[[], float] = time.monotonic
    """Seconds from any start, for durations; the engine's clock."""
    now: Callable[[], float] = time.time
    """Seconds since 1970, for time stamps."""
