"""The routing of a step that is made of runs of tokens, as requests are laid out in a batch.

Worked out in plain loops over the runs. A step's first operators of torch wait for their code to
come into the caches, up to some milliseconds where it has not run for a second, and 25 of them were
needed whenever a sequence came or went.

Letters: `T` tokens of the step, `E` entries, `G` segments.
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, NamedTuple

import torch

from lora_kernels.build import make_routing, out_of_range
from lora_kernels.errors import KernelArgumentError
from lora_kernels.routing import Segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lora_kernels.routing import Routing


class _Piece(NamedTuple):
    """What one run has of one slot."""

    start: int
    length: int
    scales: list[float]
    """One for each of its entries a token has."""
    is_shared: bool
    """Whether its tokens have entries of other slots too, or several of this one."""

    @property
    def is_scaled(self) -> bool:
        """Whether some entry is not added as it is."""
        return any(scale != 1 for scale in self.scales)


def route_runs(
    runs: Sequence[tuple[int, Sequence[tuple[int, float]]]],
    *,
    num_slots: int,
    device: torch.device | str = "cpu",
) -> Routing:
    """Build the routing of a step made of runs of tokens.

    Args:
        runs: for each run its number of tokens and its `(slot, scale)` pairs, each applied to
            every token of the run; none for a run of the base model.
        num_slots: slots of the stacked weights.
        device: where the operators will run.

    Returns:
        As `build_routing`: entries sorted by slot, then by token.

    Raises:
        KernelArgumentError: a length is negative, or a slot or scale is out of range.
    """
    pieces, num_tokens = _pieces_of(runs, num_slots)
    token_idx, scales = array("q"), array("f")
    bounds, segments = array("q", [0]), []
    for slot in sorted(pieces):
        for piece in pieces[slot]:
            _add_entries(token_idx, scales, piece)
        segments.append(_segment(slot, bounds[-1], len(token_idx), pieces[slot]))
        bounds.append(len(token_idx))
    mixed = (slot for slot, own in pieces.items() if any(p.is_shared or p.is_scaled for p in own))
    return make_routing(
        _tensor(token_idx, torch.int64),
        _tensor(scales, torch.float32),
        _tensor(bounds, torch.int64),
        _tensor(array("q", sorted(pieces)), torch.int64),
        segments=tuple(segments),
        has_unit_scales=not any(piece.is_scaled for own in pieces.values() for piece in own),
        has_repeated_tokens=any(length > 0 and len(pairs) > 1 for length, pairs in runs),
        mixed_slots=frozenset(mixed),
        num_tokens=num_tokens,
        num_slots=num_slots,
        device=torch.device(device),
    )


def _pieces_of(
    runs: Sequence[tuple[int, Sequence[tuple[int, float]]]], num_slots: int
) -> tuple[dict[int, list[_Piece]], int]:
    """Return what the runs have of each slot, in the order of their tokens; and `T`."""
    pieces: dict[int, list[_Piece]] = {}
    start = 0
    for length, pairs in runs:
        if length < 0:
            raise KernelArgumentError(f"routing: a run has {length} tokens, expected 0 or more")
        own: dict[int, list[float]] = {}
        for slot, scale in pairs if length else ():
            if not 0 <= slot < num_slots:
                raise out_of_range("slots", slot, num_slots)
            own.setdefault(slot, []).append(_float32(scale))
        for slot, scales in own.items():
            pieces.setdefault(slot, []).append(_Piece(start, length, scales, len(pairs) > 1))
        start += length
    return pieces, start


def _float32(scale: float) -> float:
    """Return the scale as the operators will see it."""
    found = array("f", [scale])[0]
    if not math.isfinite(found):
        raise KernelArgumentError("routing: scales holds NaN or infinity, expected finite factors")
    return found


def _add_entries(token_idx: array[int], scales: array[float], piece: _Piece) -> None:
    tokens = range(piece.start, piece.start + piece.length)
    count = len(piece.scales)
    token_idx.extend(tokens if count == 1 else (t for t in tokens for _ in range(count)))
    scales.extend(array("f", piece.scales) * piece.length)


def _segment(slot: int, start: int, end: int, pieces: Sequence[_Piece]) -> Segment:
    """Return the segment of a slot; its tokens are a run where its pieces are side by side."""
    first = pieces[0].start
    last = pieces[-1].start + pieces[-1].length
    is_run = last - first == end - start and all(len(piece.scales) == 1 for piece in pieces)
    return Segment(slot=slot, start=start, end=end, first_token=first if is_run else None)


def _tensor(values: array[int] | array[float], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
