"""SlotWriter: writes one adapter into a slot of every wrapped module, all of it or nothing.

Knows slots and prepared tensors; which adapter goes where is the cache's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lora_layers.prepare import PreparedAdapter
    from lora_layers.step import StepState
    from lora_layers.wrappers import SlotStack


class SlotWriter:
    """The `lora_cache.Placer` of a model: one slot number means that slot of every module."""

    def __init__(self, stacks: Mapping[str, SlotStack], step: StepState) -> None:
        """Write into `stacks`; a step whose slot is overwritten is forgotten."""
        self._stacks = stacks
        self._step = step

    def place(self, key: str, value: PreparedAdapter, slot: int) -> None:
        """Write `value` into `slot` of every module; what it does not touch is reset to zero.

        Raises:
            KernelError: a module refuses its tensors. The slot is then zero in every module, and
                the other slots are as they were.
        """
        del key
        self._forget_step_using(slot)
        try:
            for path, stack in self._stacks.items():
                slices = value.slices.get(path)
                if slices is None:
                    stack.reset(slot)
                else:
                    stack.write(slot, slices)
        except BaseException:
            self.clear(slot)
            raise

    def clear(self, slot: int) -> None:
        """Zero `slot` in every module."""
        self._forget_step_using(slot)
        for stack in self._stacks.values():
            stack.reset(slot)

    def _forget_step_using(self, slot: int) -> None:
        """Stop the current step from running on without its adapter, as base or as another."""
        if self._step.uses_slot(slot):
            self._step.forget()
