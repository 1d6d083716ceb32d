"""What the engine's thread, and those who manage adapters, need of whatever computes the answers.

Two kinds of cores exist: one that generates, and one that classifies and embeds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .messages import EngineOutput
from .pooling_request import PoolingOutput, PoolingRequest
from .request import GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from .admission import AdapterAdmission
    from .stats import EngineStats
    from .usage import AdapterUsage

R = TypeVar("R")

Output = EngineOutput | PoolingOutput
"""Anything a core says of a request."""

AnyRequest = GenerationRequest | PoolingRequest
"""Anything a core can be asked for; each kind of core knows one of them."""


class Core(Protocol):
    """All state of a running engine. Every method belongs to the engine thread."""

    before_forward: Callable[[], None]
    """Called when it is decided what a step computes, and whenever one may take longer than that:
    the time to hand out what the last one brought."""

    @property
    def adapters(self) -> AdapterAdmission | None:
        """The adapters; None where they are switched off."""

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""

    def submit(self, request: Any) -> None:
        """Queue a request of the core's own kind."""

    def abort(self, request_id: str) -> Sequence[Output]:
        """End a request now; what it held is free on return."""

    def abort_all(self) -> Sequence[Output]:
        """End every request and every claim."""

    def is_known(self, request_id: str) -> bool:
        """Whether the request is unfinished."""

    def step(self) -> tuple[Sequence[Output], bool]:
        """Run one step; say what is new, and whether nothing could run."""

    def rest(self) -> bool:
        """Do what was put off while requests ran; say whether there may be more of it."""

    def claim_slot(self, digest: str, action: Callable[[], None]) -> Future[None]:
        """Call `action` once an adapter is in a slot; it waits for one as requests do."""

    def retire(self, digest: str) -> None:
        """Free an adapter that nobody uses."""

    def stats(self) -> EngineStats:
        """Numbers of this moment."""

    def usage(self) -> Mapping[str, AdapterUsage]:
        """How much each adapter is asked for, by digest; absent when it never was."""


class AdapterEngine(Protocol):
    """The engine, as far as the management of adapters is concerned."""

    def call(self, function: Callable[[Core], R]) -> Future[R]:
        """Run a function on the engine thread between two steps."""
