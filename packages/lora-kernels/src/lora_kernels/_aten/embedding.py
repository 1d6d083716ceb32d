"""embedding_lora_: a gather of elements of A, then bags over the rows of B.

Letters: `T` tokens, `E` entries, `N` slots, `R` max rank, `D` embedding width, `V` vocabulary,
`F` elements of bags: ranks summed over the entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_kernels._aten.bags import bags_of
from lora_kernels._aten.linear import add_bags_, expand_
from lora_kernels.checks import check_ids

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.routing import Routing
    from lora_kernels.weights import StackedWeights


def embedding_lora_(
    y_TD: Tensor, token_ids_T: Tensor, weights: StackedWeights, routing: Routing
) -> Tensor:
    """See `lora_kernels.embedding_lora_`."""
    ids_E = check_ids("embedding_lora_", token_ids_T, weights, routing)
    ranks = tuple([weights.slot_ranks[segment.slot] for segment in routing.segments])
    bags = bags_of(weights, routing, ranks)
    row_F = bags.rank * weights.num_slots + bags.slot  # row of A seen as [R * N, V]
    v_F = weights.a_storage.take(row_F * weights.in_features + ids_E[bags.entry])
    if weights.dtype == torch.float16:
        # Sums of float16 overflow where the result would be finite: widen through `expand_`.
        shape = (1, routing.num_entries, weights.max_rank)
        v_1ER = torch.zeros(shape, dtype=torch.float32, device=y_TD.device)
        v_1ER[0, bags.entry, bags.rank] = v_F.float()
        return expand_(y_TD, v_1ER, weights, routing)
    if not routing.has_unit_scales:
        v_F.mul_(routing.scales[bags.entry])
    return add_bags_(y_TD, v_F, weights, routing, bags)
