"""Reference of embedding_lora_: one entry after the other, in float32.

Letters: `T` tokens, `D` embedding width, `R` max rank, `V` vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_kernels.errors import KernelArgumentError
from lora_kernels.reference.linear import add_rows_, entries

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.routing import Routing
    from lora_kernels.weights import StackedWeights


def embedding_lora_(
    y_TD: Tensor, token_ids_T: Tensor, weights: StackedWeights, routing: Routing
) -> Tensor:
    """`y[t_e] += scale_e * B[slot_e, :, :r] @ A[slot_e, :r, token_ids[t_e]]`, gain and bias."""
    delta_TD = torch.zeros(y_TD.shape, dtype=torch.float32, device=y_TD.device)
    for _, token, slot, scale in entries(routing):
        token_id = int(token_ids_T[token])
        if not 0 <= token_id < weights.in_features:
            raise KernelArgumentError(
                f"embedding_lora_: token_ids[{token}] is {token_id}, "
                f"expected 0..{weights.in_features - 1}"
            )
        (rank,) = weights.slot_ranks[slot]
        v_r = weights.lora_a[0][slot, :rank, token_id].float()
        delta_TD[token] += scale * (weights.lora_b[0][slot, :, :rank].float() @ v_r)
    return add_rows_(y_TD, delta_TD, weights, routing)
