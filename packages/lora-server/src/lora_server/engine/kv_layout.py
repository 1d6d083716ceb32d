"""Where a step's tokens are in the KV store, as arrays of 64-bit integers.

Plain arrays on purpose. An operator of torch or numpy that has not run for a second takes up to
some milliseconds, because its code is in no cache and some of it in no page table any more, and a
new mix of sequences needs a dozen of them: 20 ms between two forward passes were measured, where
loops over the sequences take a tenth of a millisecond.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def int64_array(values: Iterable[int] = ()) -> array[int]:
    """Return an array of 64-bit integers."""
    return array("q", values)


def as_tensor(
    values: array[int], device: torch.device, *, start: int = 0, count: int | None = None
) -> torch.Tensor:
    """Return numbers of an array as an int64 tensor: on a CPU the same memory.

    Args:
        values: where they are; it can no longer grow then.
        device: where the tensor is to be.
        start: the first one.
        count: how many; None takes all that follow.
    """
    count = len(values) - start if count is None else count
    if not count:
        return torch.empty(0, dtype=torch.int64, device=device)
    found = torch.frombuffer(values, dtype=torch.int64, count=count, offset=start * values.itemsize)
    return found if device.type == "cpu" else found.to(device, non_blocking=True)


def split_tensor(
    moving: array[int], group_sizes: Sequence[int], device: torch.device
) -> list[torch.Tensor]:
    """Return positions `[T]` and places `[T]` of a step's tokens, then the groups' positions.

    Args:
        moving: all of them, in that order.
        group_sizes: sequences of each decode group.
        device: where the tensors are to be.
    """
    num_tokens = (len(moving) - sum(group_sizes)) // 2
    found, start = [], 0
    for count in (num_tokens, num_tokens, *group_sizes):
        found.append(as_tensor(moving, device, start=start, count=count))
        start += count
    return found


def add_slots(
    slots: array[int], block_ids: Sequence[int], *, start: int, count: int, block_size: int
) -> None:
    """Append the places of consecutive tokens of a sequence in the flat store.

    Args:
        slots: is extended.
        block_ids: of the sequence.
        start: position of the first token.
        count: how many.
        block_size: tokens of a block.
    """
    stop = start + count
    while start < stop:
        number, offset = divmod(start, block_size)
        end = min(stop, start - offset + block_size)
        first = block_ids[number] * block_size + offset
        slots.extend(range(first, first + end - start))
        start = end


def padded_blocks(tables: Iterable[array[int]], width: int) -> array[int]:
    """Return the first `width` blocks of each sequence, one sequence after the other.

    Args:
        tables: the blocks of each, at least one. Its first one stands for those it has not.
        width: blocks of each in the result.
    """
    found = array("q")
    for blocks in tables:
        found.extend(blocks[:width])
        if len(blocks) < width:
            found.extend(blocks[:1] * (width - len(blocks)))
    return found
