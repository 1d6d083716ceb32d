"""The step's routing: built from runs of rows, shared by reference with every wrapped module.

Knows keys and slots; nothing of requests, layers or weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import lora_kernels as kernels
from lora_kernels import Routing

if TYPE_CHECKING:
    import torch

SlotLookup: TypeAlias = Callable[[Sequence["RowRun"]], dict[str, int]]
"""Runs -> slot of each key they name; raises when one cannot be used in that way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRun:
    """Consecutive rows of a step that use the same weighted set of adapters."""

    num_rows: int
    """Rows in the run; 0 adds nothing."""

    adapters: tuple[tuple[str, float], ...] = ()
    """(key, scale) of each adapter; empty for the base model. The deltas add up, each times its
    scale."""


class NoRouting:
    """Stands where a routing would be while none is set, so that no call can go on without one."""


NO_ROUTING = NoRouting()


class ResultKeeper(Protocol):
    """A module that keeps a result for calls to come, which a new routing makes wrong."""

    def drop(self) -> None:
        """Forget it."""


class RoutingCell:
    """The place from which wrapped modules read the step's routing.

    `active` is None when no row of the step has an adapter: then a module adds nothing, at the
    price of one comparison.
    """

    __slots__ = ("active", "keepers", "num_writes")

    def __init__(self) -> None:
        self.active: Routing | NoRouting | None = NO_ROUTING
        self.keepers: set[ResultKeeper] = set()
        """Who keeps a result that was computed under this routing."""
        self.num_writes = 0
        """Slots written or reset so far in the modules that read here."""


class _Memo:
    """The routing of one kind of rows, and what it was made from."""

    __slots__ = ("cell", "layout_version", "routing", "runs")

    def __init__(self) -> None:
        self.cell = RoutingCell()
        self.forget()

    def forget(self) -> None:
        self.runs: tuple[RowRun, ...] | None = None
        self.layout_version = -1
        self.routing: Routing | None = None
        """None where no run has an adapter, or nothing is kept."""
        self.cell.active = NO_ROUTING

    def holds(self, runs: tuple[RowRun, ...], layout_version: int) -> bool:
        return layout_version == self.layout_version and runs == self.runs

    def keep(self, runs: tuple[RowRun, ...], layout_version: int, routing: Routing | None) -> None:
        self.runs, self.layout_version, self.routing = runs, layout_version, routing

    def publish(self) -> None:
        is_empty = self.routing is None or self.routing.is_empty
        self.cell.active = None if is_empty else self.routing


class StepState:
    """The routing of the current step, for token rows and for logits rows.

    Rebuilt only when the runs **or** the slot layout changed: an adapter activated beside a step
    may have moved slots under unchanged runs. One thread owns it.
    """

    def __init__(self, *, num_slots: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self._device = device
        self._tokens = _Memo()
        self._logits = _Memo()
        self.num_builds = 0
        """Routings built so far; a step that reuses one does not count."""

    @property
    def tokens(self) -> RoutingCell:
        """Where modules that see every token of the step read."""
        return self._tokens.cell

    @property
    def logits(self) -> RoutingCell:
        """Where modules that see only the rows that get logits read."""
        return self._logits.cell

    def set(
        self,
        tokens: Sequence[RowRun],
        logits: Sequence[RowRun],
        *,
        layout_version: int,
        slots_of: SlotLookup,
    ) -> None:
        """Set both routings, or neither: after an error no routing is set.

        Raises:
            AdapterNotActiveError: a run names an adapter that is in no slot.
            NotLinearError: a run scales or mixes an adapter that allows neither.
        """
        for cell in (self.tokens, self.logits):
            cell.active = NO_ROUTING
            for keeper in tuple(cell.keepers):
                keeper.drop()
        token_runs, logits_runs = tuple(tokens), tuple(logits)
        self._renew(self._tokens, token_runs, layout_version, slots_of)
        if logits_runs == token_runs:  # every row gets logits: decode
            self._logits.keep(logits_runs, layout_version, self._tokens.routing)
        else:
            self._renew(self._logits, logits_runs, layout_version, slots_of)
        self._tokens.publish()
        self._logits.publish()

    def forget(self) -> None:
        """Drop both routings: until the next `set` modules with adapters refuse to run."""
        self._tokens.forget()
        self._logits.forget()

    def uses_slot(self, slot: int) -> bool:
        """Whether the current routing reads `slot`."""
        return any(
            segment.slot == slot
            for memo in (self._tokens, self._logits)
            if memo.routing is not None
            for segment in memo.routing.segments
        )

    def _renew(
        self, memo: _Memo, runs: tuple[RowRun, ...], layout_version: int, slots_of: SlotLookup
    ) -> None:
        if memo.holds(runs, layout_version):
            return
        if not any(run.adapters for run in runs):
            memo.keep(runs, layout_version, None)
            return
        routing = route_runs(runs, slots_of(runs), num_slots=self._num_slots, device=self._device)
        memo.keep(runs, layout_version, routing)
        self.num_builds += 1


def route_runs(
    runs: Sequence[RowRun], slots: dict[str, int], *, num_slots: int, device: torch.device
) -> Routing:
    """Build the routing of runs whose adapters all have a slot.

    Raises:
        KernelArgumentError: a scale is not finite.
    """
    return kernels.route_runs(
        [(run.num_rows, [(slots[key], scale) for key, scale in run.adapters]) for run in runs],
        num_slots=num_slots,
        device=device,
    )
