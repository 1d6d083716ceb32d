"""SlotWriter: writes one adapter into a slot of every wrapped module, all of it or nothing.

Knows slots and prepared tensors; which adapter goes where is the cache's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lora_layers.content import PreparedAdapter
    from lora_layers.step import StepState
    from lora_layers.wrappers import SlotStack


class SlotWriter:
    """The `lora_cache.Placer` of a model: one slot number means that slot of every module."""

    def __init__(self, stacks: Mapping[str, SlotStack], step: StepState) -> None:
        """Write into `stacks`; a step whose slot is overwritten is forgotten."""
        self._stacks = stacks
        self._step = step
        self.not_linear: set[int] = set()
        """Slots whose adapter allows neither another scale nor another adapter beside it."""

    def place(self, key: str, value: PreparedAdapter, slot: int) -> None:
        """Write `value` into `slot` of every module; what it does not touch is reset to zero.

        Raises:
            KernelError: a module refuses its tensors. The slot is then zero in every module, and
                the other slots are as they were.
        """
        del key
        self._forget_step_using(slot)
        self.not_linear.discard(slot)
        try:
            for path, stack in self._stacks.items():
                content = value.contents.get(path)
                if content is None:
                    stack.reset(slot)
                else:
                    stack.write(slot, content)
        except BaseException:
            self.clear(slot)
            raise
        if not value.is_linear:
            self.not_linear.add(slot)

    def clear(self, slot: int) -> None:
        """Zero `slot` in every module."""
        self._forget_step_using(slot)
        self.not_linear.discard(slot)
        for stack in self._stacks.values():
            stack.reset(slot)

    def _forget_step_using(self, slot: int) -> None:
        """Stop the current step from running on without its adapter, as base or as another."""
        if self._step.uses_slot(slot):
            self._step.forget()
