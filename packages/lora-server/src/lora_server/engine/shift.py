"""How far rows have moved: the numbers of a proof of effect. Knows no model and no adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from lora_server.effect import LogitShift, ShiftOf

if TYPE_CHECKING:
    from collections.abc import Sequence


class Piece(NamedTuple):
    """What some rows of a longer text have moved."""

    num_rows: int
    shift: LogitShift | None
    """None where their numbers are not finite."""


def compare_rows(base: torch.Tensor, own: torch.Tensor, *, of: ShiftOf) -> LogitShift | None:
    """Return how far rows have moved; None where the numbers are not finite.

    Args:
        base: the base's rows; the last of them is that of the last position.
        own: the adapter's rows, of the same shape.
        of: what they are.
    """
    # What both rule out altogether, minus infinity, has not moved.
    moved = torch.where(own == base, 0.0, (own.double() - base.double()).abs())
    if not bool(moved.isfinite().all()):
        return None
    kl = None
    if of is ShiftOf.LOG_PROBABILITIES:
        last, last_own = base[-1].double(), own[-1].double()
        terms = last.exp() * (last - last_own)
        kl = max(float(terms[last.isfinite()].sum()), 0.0)  # rounding can leave less than nothing
    return LogitShift(max=float(moved.max()), mean=float(moved.mean()), kl=kl, of=of)


def join_pieces(pieces: Sequence[Piece]) -> LogitShift | None:
    """Return what `compare_rows` says of all rows together; None where a piece has no shift.

    Args:
        pieces: in the order of their rows, of the same kind; at least one.
    """
    found = [(piece.num_rows, piece.shift) for piece in pieces if piece.shift is not None]
    if len(found) < len(pieces):
        return None
    last = found[-1][1]
    return LogitShift(
        max=max(shift.max for _, shift in found),
        mean=sum(count * shift.mean for count, shift in found) / sum(n for n, _ in found),
        kl=last.kl,
        of=last.of,
    )
