"""The adapters by name: which version each name stands for, and how names come and go.

Belongs to the event loop's thread; the versions themselves belong to the engine. A version is
retired in the engine once no name stands for it and no request that chose it is unfinished.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from lora_cache import CacheError, Residency
from lora_server.effect import ProbeState
from lora_server.engine.journal import AdapterJournal
from lora_server.engine.usage import AdapterUsage
from lora_server.errors import (
    AdapterAlreadyLoadedError,
    AdapterNotLoadedError,
    DigestMismatchError,
    InvalidRequestError,
    ModelNotFoundError,
    StartupError,
)
from lora_server.lora_modules import LoraModule, adapter_name_problem

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )
    from concurrent.futures import Future

    from lora_server.effect import AdapterEffect, LogitShift
    from lora_server.engine.admission import AdapterAdmission
    from lora_server.engine.core import AdapterEngine, Core
    from lora_server.model.labels import AdapterLabels

    from .loader import AdapterLoader, ReadAdapter
    from .paths import AdapterRoots

R = TypeVar("R")

_MAX_PROBE_WAIT_S = 1.0
"""How long a load waits for the proof of its effect; it is told later where steps are slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEntry:
    """One name and the version it stands for."""

    name: str
    digest: str
    path: str
    parent: str
    rank: int
    size_bytes: int
    created_s: float
    """Seconds since 1970 when this version was loaded under this name."""
    is_linear: bool
    """Whether it may be scaled, and be one of a weighted set."""
    labels: AdapterLabels
    effect: AdapterEffect | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCard:
    """What is told about one adapter."""

    name: str
    path: str
    parent: str
    digest: str
    rank: int
    residency: str
    """`device`, `host` or `disk`."""
    pinned: bool
    size_bytes: int
    created_s: float
    hits: int
    """Times it was needed and was in its slot already."""
    waiting: int
    """Sequences with it that wait to be admitted."""
    running: int
    """Sequences with it that are being generated."""
    effect: AdapterEffect | None
    """What it was shown to change."""


class AdapterCatalog:
    """Names of the base model and of the adapters."""

    def __init__(
        self,
        *,
        engine: AdapterEngine,
        loader: AdapterLoader | None,
        roots: AdapterRoots,
        base_names: Sequence[str],
        journal: AdapterJournal | None = None,
    ) -> None:
        """Begin with the base's names.

        Args:
            engine: where versions live.
            loader: reads adapters; None where they are switched off.
            roots: below which folders that may be done at run time.
            base_names: names of the base model.
            journal: is told of loads and unloads; None keeps them in the log only.
        """
        self._journal = journal if journal is not None else AdapterJournal()
        self._engine = engine
        self._loader = loader
        self._roots = roots
        self.base_names = tuple(base_names)
        self._entries: dict[str, AdapterEntry] = {}
        self._holds: Counter[str] = Counter()
        """Unfinished requests by digest, and names that stand for it."""
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Base names, then adapter names in the order of their first load."""
        return (*self.base_names, *self._entries)

    def is_base(self, name: str) -> bool:
        """Whether `name` is one of the base model's, exactly."""
        return name in self.base_names

    def resolve(self, name: str) -> AdapterEntry:
        """The version that a name stands for now.

        Raises:
            ModelNotFoundError: no adapter has exactly this name.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise ModelNotFoundError(name, self.names)
        return entry

    def labels_of(self, digest: str) -> AdapterLabels | None:
        """What a version brings of a classification head; None when no name stands for it."""
        entries = self._entries.values()
        return next((entry.labels for entry in entries if entry.digest == digest), None)

    @contextmanager
    def hold(self, digests: Iterable[str]) -> Iterator[None]:
        """Keep versions from being retired while a request that chose them is unfinished."""
        held = tuple(digests)
        self._holds.update(held)
        try:
            yield
        finally:
            for digest in held:
                self._release(digest)

    def load_static(self, modules: Sequence[LoraModule]) -> None:
        """Load the adapters named at start. Blocks; call it before the service takes requests.

        Raises:
            StartupError: with the problems of all adapters.
        """
        problems: list[str] = []
        for module in modules:
            try:
                found = self._require_loader().read(module.path)
                self._engine.call(partial(_add, found=found, name=module.name)).result()
            except Exception as error:  # noqa: BLE001 - every adapter's failure is listed
                problems.append(f"adapter {module.name!r}: {error}")
                continue
            self._set_entry(module.name, found, module.base_model_name)
        if problems:
            raise StartupError(problems)

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
        """Load an adapter from the disk; when this returns, the next request is served by it.

        Args:
            name: the new name, or with `load_inplace` one that is taken.
            path: a folder below one of the roots.
            load_inplace: replace the version the name stands for.
            pinned: pin the adapter as well.
            expected_digest: refuse unless the name stands for this version now.
            check: called with the new version's digest while it can be asked for by that alone;
                what it raises keeps the old version and frees the new one.

        Raises:
            RequestError: one of its kinds, for every mistake of the caller's; the name then stands
                for what it stood for before.
        """
        if problem := adapter_name_problem(name, self.base_names):
            raise InvalidRequestError(problem, param="lora_name")
        async with self._serialised(name):
            self._check_current(name, load_inplace=load_inplace, expected_digest=expected_digest)
            real = self._roots.resolve(path)
            loader = self._require_loader()
            loop = asyncio.get_running_loop()
            with self._failure_noted(name):
                found = await loop.run_in_executor(loader.threads, loader.read, real)
                with self.hold([found.digest]):
                    probed = await self._on_engine(lambda core: _add(core, found, name))
                    if probed is not None:
                        probe = asyncio.wrap_future(probed)
                        await asyncio.wait([probe], timeout=_MAX_PROBE_WAIT_S)
                    if check is not None:
                        await check(found.digest)
                    if pinned:
                        await self._pin(found.digest, replaced=self._only_digest_of(name))
                    self._set_entry(name, found, None)
        return await self.card(name)

    async def unload(self, name: str) -> None:
        """Forget a name at once; requests that chose it before finish.

        Raises:
            AdapterNotLoadedError: no adapter has exactly this name.
        """
        async with self._serialised(name):
            entry = self._entry(name)
            del self._entries[name]
            self._let_go(entry.digest)
            self._journal.unloaded(
                name,
                entry.digest,
                size_bytes=entry.size_bytes,
                seconds=time.time() - entry.created_s,
            )

    async def pin(self, name: str) -> AdapterCard:
        """Keep an adapter in its slot, waiting for one as requests do.

        Raises:
            AdapterNotLoadedError: no adapter has exactly this name.
            InvalidRequestError: other pins leave no slot for it.
            EngineError: it could not be read again from where it was loaded.
        """
        async with self._serialised(name):
            entry = self._entry(name)
            with self.hold([entry.digest]):
                await self._pin(entry.digest)
        return await self.card(name)

    async def unpin(self, name: str) -> AdapterCard:
        """Let an adapter be evicted again.

        Raises:
            AdapterNotLoadedError: no adapter has exactly this name.
        """
        async with self._serialised(name):
            digest = self._entry(name).digest
            await self._on_engine(lambda core: _unpin(core, digest))
        return await self.card(name)

    async def card(self, name: str) -> AdapterCard:
        """One adapter's card.

        Raises:
            AdapterNotLoadedError: no adapter has exactly this name.
        """
        entry = self._entry(name)
        states = await self._on_engine(lambda core: _states(core, [entry.digest]))
        return _card(entry, states)

    async def cards(self) -> list[AdapterCard]:
        """The cards of all adapters, in the order of their first load."""
        entries = list(self._entries.values())
        if not entries:
            return []
        digests = [entry.digest for entry in entries]
        states = await self._on_engine(lambda core: _states(core, digests))
        return [_card(entry, states) for entry in entries]

    def _entry(self, name: str) -> AdapterEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise AdapterNotLoadedError(name, tuple(self._entries))
        return entry

    def _check_current(self, name: str, *, load_inplace: bool, expected_digest: str | None) -> None:
        """Refuse to take a name that is taken, or to replace a version nobody expected."""
        current = self._entries.get(name)
        if expected_digest is not None and (current is None or current.digest != expected_digest):
            found = "not loaded" if current is None else f"version {current.digest}"
            raise DigestMismatchError(
                f"adapter {name!r} is {found}, expected version {expected_digest}",
                param="expected_digest",
            )
        if current is not None and not load_inplace:
            raise AdapterAlreadyLoadedError(
                f"adapter {name!r} is loaded (version {current.digest[:12]});"
                " load_inplace replaces it",
                param="lora_name",
            )

    def _set_entry(self, name: str, found: ReadAdapter, parent: str | None) -> None:
        """Let the name stand for a version that the engine knows."""
        before = self._entries.get(name)
        if parent is None:
            parent = self.base_names[0] if before is None else before.parent
        self._entries[name] = AdapterEntry(
            name=name,
            digest=found.digest,
            path=found.path,
            parent=parent,
            rank=found.rank,
            size_bytes=found.size_bytes,
            created_s=time.time(),
            is_linear=found.prepared.is_linear,
            labels=found.labels,
            effect=found.effect,
        )
        self._holds[found.digest] += 1
        if before is not None:
            self._let_go(before.digest)
        self._journal.loaded(
            name,
            found.digest,
            rank=found.rank,
            size_bytes=found.size_bytes,
            seconds=found.load_s,
            replaced=None if before is None else before.digest,
        )

    def _let_go(self, digest: str) -> None:
        """One name fewer stands for a version; without a name it is no longer pinned either."""
        if all(entry.digest != digest for entry in self._entries.values()):
            self._engine.call(lambda core: _unpin(core, digest))
        self._release(digest)

    def _release(self, digest: str) -> None:
        self._holds[digest] -= 1
        if self._holds[digest] == 0:
            del self._holds[digest]
            self._engine.call(lambda core: core.retire(digest))

    @contextmanager
    def _failure_noted(self, name: str) -> Iterator[None]:
        """Note why an adapter could not be loaded under a name, if so."""
        start_s = time.perf_counter()
        try:
            yield
        except Exception as error:
            self._journal.load_failed(name, error, seconds=time.perf_counter() - start_s)
            raise

    def _require_loader(self) -> AdapterLoader:
        if self._loader is None:
            raise InvalidRequestError("the server was started with --no-enable-lora")
        return self._loader

    async def _on_engine(self, function: Callable[[Core], R]) -> R:
        return await self._answer(self._engine.call(function))

    async def _answer(self, future: Future[R]) -> R:
        """Wait for the engine; what its cache refuses is the caller's mistake."""
        try:
            return await asyncio.wrap_future(future)
        except CacheError as error:
            raise InvalidRequestError(str(error), param="lora_name") from error

    async def _pin(self, digest: str, *, replaced: str | None = None) -> None:
        """Pin a version once a slot is free for it, in place of the pin of `replaced`."""
        outcome = await self._on_engine(lambda core: _claim_pin(core, digest, replaced))
        await self._answer(outcome)

    def _only_digest_of(self, name: str) -> str | None:
        """The version that stands for this name and for no other."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        others = (e.digest for e in self._entries.values() if e.name != name)
        return None if entry.digest in others else entry.digest

    @asynccontextmanager
    async def _serialised(self, name: str) -> AsyncIterator[None]:
        """One management call for a name at a time; a name nobody asks about leaves no lock."""
        lock, users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[name]
            if users == 1:
                del self._locks[name]
            else:
                self._locks[name] = (lock, users - 1)


@dataclass(frozen=True, slots=True)
class _State:
    residency: Residency
    is_pinned: bool
    usage: AdapterUsage
    probe: tuple[ProbeState, LogitShift | None]


def _admission(core: Core) -> AdapterAdmission:
    if core.adapters is None:
        raise InvalidRequestError("the server was started with --no-enable-lora")
    return core.adapters


def _add(core: Core, found: ReadAdapter, name: str) -> Future[None] | None:
    """Put a version in the host tier; return what ends when its probe, begun now, has run."""
    admission = _admission(core)
    admission.add(found.digest, found.prepared, found.path, name=name)
    prober = admission.prober
    return None if prober is None else prober.ask(found.digest, is_idle=not core.has_work)


def _claim_pin(core: Core, digest: str, replaced: str | None) -> Future[None]:
    admission = _admission(core)
    admission.check_pin(digest, replaced=replaced)
    return core.claim_slot(digest, partial(admission.pin, digest, replaced=replaced))


def _unpin(core: Core, digest: str) -> None:
    manager = _admission(core).manager
    if digest in manager:
        manager.unpin(digest)


def _states(core: Core, digests: Iterable[str]) -> dict[str, _State]:
    admission = _admission(core)
    manager, prober = admission.manager, admission.prober
    usage = core.usage()
    unused = AdapterUsage()
    return {
        digest: _State(
            manager.residency(digest),
            manager.is_pinned(digest),
            usage.get(digest, unused),
            (ProbeState.OFF, None) if prober is None else prober.state(digest),
        )
        for digest in digests
    }


def _card(entry: AdapterEntry, states: Mapping[str, _State]) -> AdapterCard:
    state = states[entry.digest]
    return AdapterCard(
        name=entry.name,
        path=entry.path,
        parent=entry.parent,
        digest=entry.digest,
        rank=entry.rank,
        residency=state.residency.value,
        pinned=state.is_pinned,
        size_bytes=entry.size_bytes,
        created_s=entry.created_s,
        hits=state.usage.hits,
        waiting=state.usage.waiting,
        running=state.usage.running,
        effect=_effect(entry, *state.probe),
    )


def _effect(
    entry: AdapterEntry, probe: ProbeState, shift: LogitShift | None
) -> AdapterEffect | None:
    effect = entry.effect
    return None if effect is None else replace(effect, probe=probe, logit_shift=shift)
