"""Output gain and bias of slots, after the pairs: `y[t] = gain * y[t] + sum_e scale_e * bias_e`.

In float32, rounded to the dtype of y once; the pairs' part was rounded before.

Letters: `T` tokens, `U` tokens with an entry, `S` entries of a segment, `O` out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lora_kernels.routing import Routing, Segment
    from lora_kernels.weights import StackedWeights


def apply_affine_(
    y_TO: Tensor, weights: StackedWeights, routing: Routing, *, batch_invariant: bool = False
) -> Tensor:
    """Finish the rows of tokens whose slots have a gain or a bias; no other row is touched.

    With `batch_invariant` the order of the operations does not depend on whether some other token
    has several entries.
    """
    if weights.affine is None:
        return y_TO
    slots = weights.gain_slots | weights.bias_slots
    segments = [s for s in routing.segments if s.slot in slots and s.end > s.start]
    if not segments:
        return y_TO
    if batch_invariant or routing.has_repeated_tokens:
        return _apply_shared_(y_TO, weights.affine, routing, segments)
    for segment in segments:
        gain_O, bias_O = weights.affine[:, segment.slot]
        bias = bias_O
        if not routing.has_unit_scales:
            bias = bias_O * routing.scales[segment.start : segment.end, None]
        if segment.first_token is not None:
            rows_SO = y_TO.narrow(0, segment.first_token, segment.end - segment.start)
            rows_SO.copy_(torch.addcmul(bias, rows_SO, gain_O))
        else:
            tokens = routing.token_idx[segment.start : segment.end]
            rows_SO = torch.addcmul(bias, y_TO.index_select(0, tokens), gain_O)
            y_TO.index_copy_(0, tokens, rows_SO.to(y_TO.dtype))
    return y_TO


def _apply_shared_(
    y_TO: Tensor, affine: Tensor, routing: Routing, segments: Sequence[Segment]
) -> Tensor:
    """Sum the biases of all entries of a token before they are rounded.

    A slot with a gain is alone on its tokens, so that gains never meet another entry's bias.
    """
    chosen = torch.cat([torch.arange(s.start, s.end, device=y_TO.device) for s in segments])
    tokens_U, row_of_entry = torch.unique(routing.token_idx[chosen], return_inverse=True)
    rows_UO = y_TO.index_select(0, tokens_U).float()
    start = 0
    for segment in segments:
        rows = row_of_entry[start : start + segment.end - segment.start]
        start += rows.shape[0]
        gain_O, bias_O = affine[:, segment.slot]
        scales_S1 = routing.scales[segment.start : segment.end, None]
        rows_UO[rows] = rows_UO[rows] * gain_O
        rows_UO.index_add_(0, rows, scales_S1 * bias_O)
    return y_TO.index_copy_(0, tokens_U, rows_UO.to(y_TO.dtype))
