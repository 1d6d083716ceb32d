"""LoraModelManager: a model whose rows may each use another adapter.

Joins the wrappers in the model, both tiers of adapters, and the step's routing. Knows no model
family, no file format, no request.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from lora_cache import AdapterCache, Residency
from lora_layers.activate import SlotWriter
from lora_layers.dummy import build_dummies
from lora_layers.effect import update_norms
from lora_layers.errors import AdapterNotActiveError, NotLinearError
from lora_layers.inject import Injector
from lora_layers.memory import describe_stacks
from lora_layers.placement import SlotQueue
from lora_layers.prepare import AdapterPreparer
from lora_layers.staging import Stager
from lora_layers.step import RowRun, StepState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import nn

    from lora_cache import CacheStats, EvictionHook, Lease
    from lora_layers.config import LoraModelConfig
    from lora_layers.content import PreparedAdapter
    from lora_layers.inject import WrapReport
    from lora_layers.memory import StackMemory
    from lora_layers.placement import WrittenSlot
    from lora_weights import Adapter, ExpertShape, ModuleShape


class LoraModelManager:
    """Wraps a model in place and manages the adapters of its rows.

    One thread owns the model and its manager; `prepare` alone may run on others. An adapter goes
    `prepare` -> `register` (host tier) -> `acquire` (device slot, held by a lease) -> `set_routing`
    -> forward -> release of the lease.
    """

    def __init__(
        self,
        model: nn.Module,
        config: LoraModelConfig,
        *,
        on_evict: EvictionHook[str] | None = None,
        is_paced: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Replace the chosen modules of `model` by wrappers and allocate all slots.

        Move the model to its device and dtype before: the slots live where the weights are, and
        packed members are views of one weight. A model on torch's `meta` device is wrapped in the
        same way and takes no memory, so that `memory` tells what a real one would take.

        Args:
            model: any module; its submodules are replaced in place.
            config: how many adapters, how large, which modules.
            on_evict: told of each adapter that has to make room for another.
            is_paced: clear the slots of removed adapters a few modules at a time, as `advance` is
                called, instead of at once.
            clock: seconds, for pauses and statistics.

        Raises:
            TargetNotFoundError: nothing in the model can carry LoRA, or `target_modules` names what
                it does not have.
            UnsupportedModuleError: `target_modules` names modules that cannot carry LoRA.
        """
        injector = Injector(model, config)
        device = injector.device or torch.device("cpu")
        self._model = model
        self._config = config
        self._step = StepState(num_slots=config.max_loras, device=device)
        self._injection, self._report = injector.inject(self._step)
        self._preparer = AdapterPreparer(
            self._injection,
            self._report,
            max_rank=config.max_lora_rank,
            target_modules=config.target_modules,
            head_task_type=config.head_task_type,
        )
        self._stager = Stager(device)
        self._writer = SlotWriter(self._injection.stacks, self._step)
        self._queue = SlotQueue(self._writer, self._stager, is_paced=is_paced, clock=clock)
        self._dummy_slots: dict[str, int] = {}
        self._cache: AdapterCache[str, PreparedAdapter] = AdapterCache(
            placer=self._queue,
            num_slots=config.max_loras,
            max_host=config.host_capacity,
            max_host_bytes=config.max_host_bytes,
            policy=config.policy,
            on_evict=on_evict,
            allow_pin_all=config.allow_pin_all,
            clock=clock,
        )

    @property
    def model(self) -> nn.Module:
        """The model, with wrappers in it until `unwrap`."""
        return self._model

    @property
    def config(self) -> LoraModelConfig:
        """What the manager was made with."""
        return self._config

    @property
    def report(self) -> WrapReport:
        """Which modules were wrapped, packed, left out, and why."""
        return self._report

    @property
    def shapes(self) -> Mapping[str, ModuleShape | ExpertShape]:
        """Path -> widths of every module that carries LoRA."""
        return MappingProxyType(self._injection.shapes)

    @property
    def slot_bytes(self) -> int:
        """Bytes that one slot takes over all modules."""
        return self.buffer_bytes // self._config.max_loras

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all slots, allocated once when the model is wrapped."""
        return sum(stack.nbytes for stack in self._injection.stacks.values())

    @property
    def prepacked_bytes(self) -> int:
        """Bytes of the second copies that `prepack_linear` keeps of base weights."""
        return sum(self._injection.prepacked.values())

    def memory(self) -> tuple[StackMemory, ...]:
        """Say what the slots take, module by module, and which ranks they hold now."""
        return tuple(describe_stacks(self._injection, self._step.logits))

    @property
    def num_routing_builds(self) -> int:
        """Routings built so far; steps that reuse the last one do not count."""
        return self._step.num_builds

    # Adapters.

    def prepare(self, adapter: Adapter) -> PreparedAdapter:
        """Match an adapter with the model, check, pack and cast it. Pure; any thread may call it.

        For a CUDA device the result lies in page-locked memory.

        Raises:
            AdapterMismatchError: the adapter does not fit; every problem at once.
        """
        return self._stager.pin(self._preparer.prepare(adapter))

    def update_norms(self, prepared: PreparedAdapter) -> dict[str, float]:
        """Return the Frobenius norm of `B A` by module path. Pure; any thread may call it."""
        return update_norms(prepared, self._injection.stacks)

    def register(self, key: str, prepared: PreparedAdapter) -> bool:
        """Put an adapter into the host tier.

        Returns:
            False if `key` is known: then nothing changed but its place in the LRU order.

        Raises:
            HostTierFullError: it does not fit beside the entries that must stay.
            RemovingError: `key` was removed and leases still hold it.
        """
        return self._cache.register(key, prepared, size_bytes=prepared.nbytes)

    def restore(self, key: str) -> bool:
        """Take back a `remove` that still waits for its last lease; False if there is none."""
        return self._cache.restore(key)

    def touch(self, keys: Collection[str]) -> None:
        """Count adapters as used in the host tier, so that others are evicted first."""
        self._cache.touch(keys)

    def remove(self, key: str) -> bool:
        """Take an adapter away: gone for new leases at once, freed when its last lease ends.

        Returns:
            False if it is not registered.
        """
        return self._cache.remove(key)

    def clear(self) -> None:
        """Remove every adapter and forget the step's routing."""
        self._cache.clear()
        self._step.forget()

    def activate(self, key: str) -> bool:
        """Bring an adapter into a slot without holding it there; False if it was in one.

        Raises:
            UnknownKeyError, NoFreeSlotError: see `lora_cache.AdapterCache.activate`.
        """
        self._check_no_warm_up()
        return self._cache.activate(key)

    def deactivate(self, key: str) -> bool:
        """Give an adapter's slot free, keep it in the host tier; False if it was in none.

        Raises:
            InUseError: it is pinned or leased.
        """
        return self._cache.deactivate(key)

    def pin(self, key: str) -> None:
        """Keep an adapter in both tiers until `unpin` or `remove`.

        Raises:
            UnknownKeyError, NoFreeSlotError, NoPinsError: see `lora_cache.AdapterCache.pin`.
        """
        self._check_no_warm_up()
        self._cache.pin(key)

    def unpin(self, key: str) -> None:
        """Let an adapter be evicted again.

        Raises:
            UnknownKeyError: it is not registered.
        """
        self._cache.unpin(key)

    def is_pinned(self, key: str) -> bool:
        """Whether an adapter is pinned."""
        return self._cache.is_pinned(key)

    def is_linear(self, key: str) -> bool:
        """Whether an adapter can take a scale other than 1, or be one of a weighted set.

        Raises:
            UnknownKeyError: it is not registered.
        """
        return self._cache.get(key).is_linear

    def num_labels(self, keys: Collection[str] = ()) -> int | None:
        """Return how many columns of the head's output belong to a row of these adapters.

        Args:
            keys: adapters of the row; none for the base.

        Returns:
            Labels of the adapter's own head, else of the base's; None for a model without one.

        Raises:
            UnknownKeyError: one of them is not registered.
        """
        own = [self._cache.get(key).num_labels for key in keys]
        heads = self._injection.heads
        if len(heads) != 1:
            return None
        base = self._injection.bases[heads[0].label_path].weight.shape[0]
        return next((labels for labels in own if labels is not None), base)

    def residency(self, key: str) -> Residency:
        """Where an adapter is: in a slot, in host memory, or in neither."""
        return self._cache.residency(key)

    def slot_of(self, key: str) -> int | None:
        """Return an adapter's slot, or None."""
        return self._cache.slot_of(key)

    def keys(self) -> tuple[str, ...]:
        """List the registered adapters, least recently used first."""
        return self._cache.keys()

    def __contains__(self, key: str) -> bool:
        return key in self._cache

    def can_admit(self, keys: Collection[str]) -> bool:
        """Whether `acquire` would succeed now; changes nothing."""
        return self._cache.can_admit(keys)

    def acquire(self, keys: Collection[str]) -> Lease[str]:
        """Bring a set of adapters into slots and hold it there: the whole set or nothing.

        Raises:
            UnknownKeyError, SetTooLargeError, NoFreeSlotError: see
                `lora_cache.AdapterCache.acquire`.
            KernelError: an adapter that did not come from `prepare` has tensors that do not fit.
        """
        self._check_no_warm_up()
        return self._cache.acquire(keys)

    def begin(self, keys: Collection[str]) -> Lease[str]:
        """Hold the slots of a set as `acquire` does, and have `advance` write the absent ones.

        Returns:
            A lease. Its adapters may be used once it is ready; when one of them cannot be written
            it ends and names the error in `failure`.

        Raises:
            UnknownKeyError, SetTooLargeError, NoFreeSlotError: as `acquire`.
        """
        self._check_no_warm_up()
        lease, moves = self._cache.begin(keys)
        for move in moves:
            self._queue.begin(move.key, self._cache.get(move.key), move.slot)
        return lease

    def advance(self, seconds: float = math.inf) -> Sequence[WrittenSlot]:
        """Go on writing the slots of `begin`; call it between two steps.

        On a CUDA device the copies run beside the steps, and a slot is written once its adapter
        has arrived.

        Args:
            seconds: how long to work at most, give or take a module; infinite: until all is done.

        Returns:
            The slots that are written now, or could not be.
        """
        written = self._queue.advance(seconds)
        for done in written:
            if done.error is None:
                self._cache.finish(done.key, done.slot, seconds=done.seconds)
            else:
                self._cache.fail(done.key, done.slot, done.error, seconds=done.seconds)
        return written

    @property
    def is_placing(self) -> bool:
        """Whether `advance` still has to write an adapter."""
        return self._queue.is_placing

    @property
    def has_slot_work(self) -> bool:
        """Whether `advance` has anything to do, clearing included."""
        return not self._queue.is_empty

    def fits_beside_pins(self, keys: Collection[str]) -> bool:
        """Whether the set fits into the slots once every lease has ended."""
        return self._cache.fits_beside_pins(keys)

    def pinned_keys(self) -> tuple[str, ...]:
        """List the pinned adapters, in the order in which they were pinned."""
        return self._cache.pinned_keys()

    def stats(self) -> CacheStats:
        """Return the state of both tiers at this moment."""
        return self._cache.stats()

    # Steps.

    def set_routing(self, tokens: Sequence[RowRun], logits: Sequence[RowRun]) -> None:
        """Say which adapters the rows of the next forward passes use.

        Holds until the next call, or until a slot it uses is overwritten. Built anew only when the
        runs or the slot layout changed.

        Args:
            tokens: runs of the rows that go through the model, in order; their sum is `T`.
            logits: runs of the rows that reach the logits modules (`lm_head`), in order.

        Raises:
            AdapterNotActiveError: a run names an adapter that is in no slot. No routing is set
                then, so that nothing can run as base instead.
            NotLinearError: a run gives a scale other than 1, or another adapter beside it, to an
                adapter with a gain or a whole module. No routing is set then.
        """
        version = self._cache.layout_version
        self._step.set(tokens, logits, layout_version=version, slots_of=self._slots_of)

    def _slots_of(self, runs: Sequence[RowRun]) -> dict[str, int]:
        keys = {key for run in runs for key, _ in run.adapters}
        slots = {key: self._dummy_slots.get(key, self._cache.slot_of(key)) for key in keys}
        found = {key: slot for key, slot in slots.items() if slot is not None}
        if len(found) < len(slots):
            absent = sorted(slots.keys() - found.keys())
            raise AdapterNotActiveError({key: self._cache.residency(key).value for key in absent})
        mixed = {
            key
            for run in runs
            if len(run.adapters) > 1 or any(scale != 1 for _, scale in run.adapters)
            for key, _ in run.adapters
        }
        not_linear = sorted(key for key in mixed if found[key] in self._writer.not_linear)
        if not_linear:
            raise NotLinearError(not_linear)
        return found

    # Warm-up and the end.

    def create_dummy_adapters(self, count: int) -> dict[str, PreparedAdapter]:
        """Build `count` adapters of zeros, `warmup_1` and on, with a part for every module."""
        return build_dummies(self._injection.stacks, count)

    @contextmanager
    def warm_up(self, count: int | None = None) -> Iterator[tuple[str, ...]]:
        """Fill free slots with dummy adapters while the block runs; leave no trace.

        Inside, the yielded keys can be named in `set_routing`; no adapter can be activated. The
        cache does not see the dummies: statistics and registered adapters stay as they are.

        Args:
            count: dummies wanted; None means one for every free slot.

        Raises:
            ValueError: there are fewer free slots than `count`.
        """
        self._check_no_warm_up()
        being_written = self._cache.placing_keys().values()
        free = [
            slot
            for slot, key in enumerate(self._cache.slots())
            if key is None and slot not in being_written
        ]
        count = len(free) if count is None else count
        if count > len(free):
            raise ValueError(f"warm-up with {count} adapters, {len(free)} slots are free")
        dummies = self.create_dummy_adapters(count)
        try:
            for slot, (key, dummy) in zip(free, dummies.items(), strict=False):
                self._queue.place(key, dummy, slot)
                self._dummy_slots[key] = slot
            yield tuple(dummies)
        finally:
            for slot in self._dummy_slots.values():
                self._writer.clear(slot)
            self._dummy_slots.clear()
            self._step.forget()

    def _check_no_warm_up(self) -> None:
        assert not self._dummy_slots, "adapters are activated after the warm-up, not during it"

    def unwrap(self) -> nn.Module:
        """Hang the original modules back, free the slots, and return the model.

        Leases still held lose their adapters.
        """
        self.clear()
        self._injection.undo()
        self._injection.stacks.clear()
        return self._model
