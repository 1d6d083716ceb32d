"""Reference of moe_lora_: one pair of entry and chosen expert after the other, in float32.

Letters: `T` tokens, `K` experts per token, `X` experts, `N` slots, `R` max rank, `I` in, `O` out,
`P` slices, `r` a true rank. `TK` is a row `t * K + k`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_kernels.reference.linear import entries

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.expert_routing import ExpertRouting
    from lora_kernels.expert_weights import ExpertWeights


def moe_lora_(
    y_TKO: Tensor,
    x_MI: Tensor,
    weights: ExpertWeights,
    expert_routing: ExpertRouting,
    router_weights_TK: Tensor | None,
) -> Tensor:
    """`y[t_e K + k] += scale_e * router[t_e, k] * B[s_e, x] @ (A[s_e, x] @ x)`, `x = ids[t_e, k]`.

    The activations are those of the token or of the row, whichever `x` has. Rounded once a row.
    """
    num_choices = expert_routing.num_choices
    has_row_x = x_MI.shape[0] == y_TKO.shape[0]
    delta_TKO = torch.zeros(y_TKO.shape, dtype=torch.float32, device=y_TKO.device)
    touched = set()
    ids = expert_routing.local_ids.tolist()
    for _, token, slot, scale in entries(expert_routing.routing):
        if not any(weights.slot_ranks[slot]):
            continue
        for k, expert in enumerate(ids[token]):
            if expert >= weights.num_experts:
                continue
            row = token * num_choices + k
            factor = (
                scale if router_weights_TK is None else scale * float(router_weights_TK[token, k])
            )
            x_I = x_MI[row if has_row_x else token].float()
            delta_TKO[row] += factor * _delta(x_I, weights, slot, expert)
            touched.add(row)
    for row in sorted(touched):
        y_TKO[row] = (y_TKO[row].float() + delta_TKO[row]).to(y_TKO.dtype)
    return y_TKO


def _delta(x_I: Tensor, weights: ExpertWeights, slot: int, expert: int) -> Tensor:
    """Return `[sum O_p]`, zero where a slice is absent."""
    delta_O = torch.zeros(weights.total_out_features, dtype=torch.float32, device=x_I.device)
    for p, rank in enumerate(weights.slot_ranks[slot]):
        low, high = weights.out_ranges[p]
        a_rI = weights.lora_a[p][slot, 0 if weights.is_a_shared else expert, :rank].float()
        b_Or = weights.lora_b[p][slot, 0 if weights.is_b_shared else expert, :, :rank].float()
        delta_O[low:high] = b_Or @ (a_rI @ x_I)
    return delta_O
