"""SlotWriter: writes one adapter into a slot of every wrapped module, all of it or nothing.

Knows slots and prepared tensors; which adapter goes where is the cache's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from lora_layers.content import PreparedAdapter
    from lora_layers.step import StepState
    from lora_layers.wrappers import ExpertStack, SlotStack


class SlotWriter:
    """The `lora_cache.Placer` of a model: one slot number means that slot of every module."""

    def __init__(self, stacks: Mapping[str, SlotStack | ExpertStack], step: StepState) -> None:
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
        try:
            for _ in self.write_by_module(value, slot):
                pass
        except BaseException:
            self.clear(slot)
            raise

    def write_by_module(self, value: PreparedAdapter, slot: int) -> Iterator[None]:
        """Write as `place` does, and pause between two modules.

        Until the last one is written the slot holds parts of two adapters and may not be used.
        After an error, or when the iterator is given up, it is the caller's to clear.
        """
        self._forget_step_using(slot)
        self.not_linear.discard(slot)
        for index, (path, stack) in enumerate(self._stacks.items()):
            if index:
                yield
            content = value.contents.get(path)
            if content is None:
                stack.reset(slot)
            else:
                # `prepare` made each content for the stack of its path.
                stack.write(slot, content)  # type: ignore[arg-type]
        if not value.is_linear:
            self.not_linear.add(slot)

    def clear(self, slot: int) -> None:
        """Zero `slot` in every module."""
        for _ in self.clear_by_module(slot):
            pass

    def clear_by_module(self, slot: int) -> Iterator[None]:
        """Zero `slot`, and pause between two modules."""
        self._forget_step_using(slot)
        self.not_linear.discard(slot)
        for index, stack in enumerate(self._stacks.values()):
            if index:
                yield
            stack.reset(slot)

    def _forget_step_using(self, slot: int) -> None:
        """Stop the current step from running on without its adapter, as base or as another."""
        if self._step.uses_slot(slot):
            self._step.forget()
