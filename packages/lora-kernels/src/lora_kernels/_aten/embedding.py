"""embedding_lora_ with one gather of columns and one matrix product a segment.

Letters: `T` tokens, `D` embedding width, `R` max rank, `V` vocabulary, `S` entries of a segment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_kernels._aten.linear import expand_
from lora_kernels.errors import KernelArgumentError

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.routing import Routing
    from lora_kernels.weights import StackedWeights


def embedding_lora_(
    y_TD: Tensor, token_ids_T: Tensor, weights: StackedWeights, routing: Routing
) -> Tensor:
    """See `lora_kernels.embedding_lora_`."""
    ids_E = token_ids_T.index_select(0, routing.token_idx)
    low, high = (int(bound) for bound in torch.aminmax(ids_E))
    if low < 0 or high >= weights.in_features:
        raise KernelArgumentError(
            f"embedding_lora_: token_ids of adapter tokens reach from {low} to {high}, "
            f"expected 0..{weights.in_features - 1}"
        )
    shape = (1, routing.num_entries, weights.max_rank)
    v_1ER = torch.zeros(shape, dtype=torch.float32, device=y_TD.device)
    for segment in routing.segments:
        (rank,) = weights.slot_ranks[segment.slot]
        rows = slice(segment.start, segment.end)
        columns_rS = weights.lora_a[0][segment.slot, :rank].index_select(1, ids_E[rows])
        v_1ER[0, rows, :rank] = columns_rS.t()
    return expand_(y_TD, v_1ER, weights, routing)
