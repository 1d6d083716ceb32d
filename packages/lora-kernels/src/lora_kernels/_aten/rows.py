"""Rows of a step: those of a segment's tokens, and those of all tokens with an entry.

Letters: `T` tokens, `U` tokens with an entry, `X` columns of any kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.routing import Routing, Segment


def take_rows(rows_TX: Tensor, segment: Segment, routing: Routing) -> Tensor:
    """Rows of a segment's tokens: a view where they are a run, else a copy."""
    if segment.first_token is not None:
        length = segment.end - segment.start
        if length == routing.num_tokens:
            return rows_TX
        return rows_TX.narrow(0, segment.first_token, length)
    return rows_TX.index_select(0, routing.token_idx[segment.start : segment.end])


def touched_rows(rows_TX: Tensor, routing: Routing) -> Tensor:
    """Rows of the tokens with an entry: a view where they are a run, else a copy."""
    if not routing.is_touched_run:
        return rows_TX.index_select(0, routing.touched_tokens)
    first, length = routing.touched_range
    return rows_TX if length == routing.num_tokens else rows_TX.narrow(0, first, length)


def put_touched_rows_(rows_TX: Tensor, rows_UX: Tensor, routing: Routing) -> Tensor:
    """Write back what `touched_rows` gave, unless that was a view."""
    if not routing.is_touched_run:
        rows_TX.index_copy_(0, routing.touched_tokens, rows_UX)
    return rows_TX
