"""What is known of slots without looking: how far they are written, whether numbers are moderate.

Products over all slots with a mask are fewer and larger than products over the slots in use, but
zero times NaN or infinity is NaN: one adapter's broken numbers would reach another's tokens.

Letters: `N` slots, `R` max rank, `P` slices, `I` in, `O` out.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

LIMIT = 2.0**60
"""Largest moderate number: a product with an activation below `2**60` stays finite in bfloat16."""


class WrittenRanks:
    """How many leading ranks of each slot may hold anything but zeros.

    Emptying a slot of a small adapter need not touch what a larger one would have taken. After a
    write through a view, which torch counts, every rank may hold something.
    """

    def __init__(self, a_storage: Tensor, b_storage: Tensor) -> None:
        """Watch the storages `[R, P, N, I]` and `[N, R, sum O_p]`, whatever they hold."""
        self._storages = (a_storage, b_storage)
        self._max_rank = a_storage.shape[0]
        self._is_watched = not a_storage.is_inference()  # inference tensors have no version
        self._ranks: dict[int, int] = {}
        """Slot -> ranks; all of a slot that is not named."""
        self._seen: tuple[int, int] | None = None

    def of(self, slot: int) -> int:
        """Return the ranks of a slot outside of which it is zero."""
        if self._seen is None or self._seen != self._versions():
            self._ranks.clear()
        return self._ranks.get(slot, self._max_rank)

    def note(self, slot: int, rank: int) -> None:
        """Record that a slot was just given this many ranks, with zeros behind them."""
        self._ranks[slot] = rank
        self._seen = self._versions()

    def _versions(self) -> tuple[int, int] | None:
        if not self._is_watched:
            return None
        a, b = self._storages
        return a._version, b._version  # noqa: SLF001 - torch has no other name


class SlotBounds:
    """Knows whether all slots are moderate, from looking at each once after it was written.

    The first question looks at every slot, and so does one after somebody wrote through a view,
    without `rewriting`: torch counts the writes to a storage. Others look at what was rewritten
    since: who never asks pays nothing.
    """

    def __init__(self, a_storage: Tensor, b_storage: Tensor) -> None:
        """Watch the storages `[R, P, N, I]` and `[N, R, sum O_p]`, whatever they hold."""
        self._a_RPNI, self._b_NRO = a_storage, b_storage
        # Elsewhere than on a CPU looking would wait for the device, and inference tensors have no
        # version: nothing is known of them.
        self._is_watched = a_storage.device.type == "cpu" and not a_storage.is_inference()
        self._immoderate: set[int] = set()
        self._unseen: dict[int, int] = {}
        """Slot -> rank of what was rewritten and not looked at yet."""
        self._seen: tuple[int, int] | None = None

    def are_moderate(self) -> bool:
        """Whether every number in every slot, named by a step or not, is within the limit."""
        if not self._is_watched:
            return False
        versions = self._versions()
        if versions != self._seen:
            num_slots, max_rank = self._b_NRO.shape[:2]
            slots = range(num_slots)
            self._immoderate = {slot for slot in slots if not self._is_moderate(slot, max_rank)}
            self._seen = versions
        else:
            unseen = self._unseen.items()
            self._immoderate |= {slot for slot, rank in unseen if not self._is_moderate(slot, rank)}
        self._unseen.clear()
        return not self._immoderate

    @contextmanager
    def rewriting(self, slot: int, rank: int) -> Iterator[None]:
        """Let the caller replace all that a slot holds by something of at most this rank."""
        nothing_else_wrote = self._versions() == self._seen
        yield
        if not self._is_watched:
            return
        self._immoderate.discard(slot)
        self._unseen[slot] = rank
        if nothing_else_wrote:
            self._seen = self._versions()

    def _versions(self) -> tuple[int, int] | None:
        if not self._is_watched:
            return None
        return self._a_RPNI._version, self._b_NRO._version  # noqa: SLF001 - torch has no other name

    def _is_moderate(self, slot: int, rank: int) -> bool:
        for factor in (self._a_RPNI[:rank, :, slot], self._b_NRO[slot, :rank]):
            if factor.numel():
                low, high = torch.aminmax(factor)
                # Comparisons with NaN, which aminmax hands on, are false.
                if not (float(low) >= -LIMIT and float(high) <= LIMIT):
                    return False
        return True
