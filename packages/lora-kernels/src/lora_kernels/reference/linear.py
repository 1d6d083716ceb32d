"""Reference of shrink, expand_ and apply_lora_: one entry after the other, in float32.

Letters: `T` tokens, `E` entries, `N` slots, `R` max rank, `I` in, `O` out, `P` slices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from lora_kernels.routing import Routing
    from lora_kernels.weights import StackedWeights


def entries(routing: Routing) -> Iterator[tuple[int, int, int, float]]:
    """Yield `(entry, token, slot, scale)` in the order of the routing."""
    tokens, scales = routing.token_idx.tolist(), routing.scales.tolist()
    for segment in routing.segments:
        for e in range(segment.start, segment.end):
            yield e, tokens[e], segment.slot, scales[e]


def shrink(x_TI: Tensor, weights: StackedWeights, routing: Routing) -> Tensor:
    """`v[p, e, :r] = A_p[slot_e, :r] @ x[token_e]` in float32; zero from the true rank on."""
    shape = (weights.num_slices, routing.num_entries, weights.max_rank)
    v_PER = torch.zeros(shape, dtype=torch.float32, device=x_TI.device)
    for e, token, slot, _ in entries(routing):
        for p, rank in enumerate(weights.slot_ranks[slot]):
            a_rI = weights.lora_a[p][slot, :rank].float()
            v_PER[p, e, :rank] = a_rI @ x_TI[token].float()
    return v_PER


def expand_(y_TO: Tensor, v_PER: Tensor, weights: StackedWeights, routing: Routing) -> Tensor:
    """`y[token_e, slice p] += scale_e * B_p[slot_e, :, :r] @ v[p, e, :r]`, then gain and bias.

    Rounded once a token.
    """
    delta_TO = torch.zeros(y_TO.shape, dtype=torch.float32, device=y_TO.device)
    for e, token, slot, scale in entries(routing):
        for p, rank in enumerate(weights.slot_ranks[slot]):
            low, high = weights.out_ranges[p]
            b_Or = weights.lora_b[p][slot, :, :rank].float()
            delta_TO[token, low:high] += scale * (b_Or @ v_PER[p, e, :rank])
    return add_rows_(y_TO, delta_TO, weights, routing)


def apply_lora_(y_TO: Tensor, x_TI: Tensor, weights: StackedWeights, routing: Routing) -> Tensor:
    """`expand_` of `shrink`."""
    return expand_(y_TO, shrink(x_TI, weights, routing), weights, routing)


def add_rows_(y_TO: Tensor, delta_TO: Tensor, weights: StackedWeights, routing: Routing) -> Tensor:
    """Finish rows of tokens that have an entry: `y[t] = gain * (y[t] + delta[t]) + bias`.

    Rows of other tokens are not even read.
    """
    gain_TO, bias_TO = torch.ones_like(delta_TO), torch.zeros_like(delta_TO)
    if weights.affine is not None:
        for _, token, slot, scale in entries(routing):
            gain_TO[token] *= weights.affine[0, slot]
            bias_TO[token] += scale * weights.affine[1, slot]
    for token in routing.touched_tokens.tolist():
        row_O = gain_TO[token] * (y_TO[token].float() + delta_TO[token]) + bias_TO[token]
        y_TO[token] = row_O.to(y_TO.dtype)
    return y_TO
