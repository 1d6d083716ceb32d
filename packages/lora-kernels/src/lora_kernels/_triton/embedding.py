"""embedding_lora_: gather a column of A for each entry, then expand.

Letters: `T` tokens, `E` entries, `R` max rank, `D` embedding width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_kernels._triton.launch import check_device, launch_options
from lora_kernels._triton.linear import expand_splits_
from lora_kernels._triton.shrink import gather_kernel
from lora_kernels.tiling import Tile, block_of_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.routing import Routing
    from lora_kernels.weights import StackedWeights


def embedding_lora_(
    y_TD: Tensor,
    token_ids_T: Tensor,
    weights: StackedWeights,
    routing: Routing,
    *,
    batch_invariant: bool,
) -> Tensor:
    """See `lora_kernels.embedding_lora_`."""
    check_device("embedding_lora_", y_TD)
    tables, a_RPNI = routing.tables, weights.a_storage
    # A rank is a read of its own, far from the next one: one warp holds all of a slot's.
    tile = Tile(block_r=block_of_ranks(weights.max_rank, 64), num_warps=1)
    shape = (1, 1, routing.num_entries, weights.max_rank)
    v_11ER = torch.empty(shape, dtype=torch.float32, device=y_TD.device)
    with torch.cuda.device_of(y_TD):
        gather_kernel[(routing.num_entries,)](
            v_11ER,
            token_ids_T,
            a_RPNI,
            tables.entry_tokens,
            tables.entry_slots,
            weights.slot_table,
            weights.in_features,
            weights.max_rank,
            token_ids_T.stride(0),
            a_RPNI.stride(0),
            a_RPNI.stride(2),
            BLOCK_R=tile.block_r,
            **launch_options(tile),
        )
    return expand_splits_(y_TD, v_11ER, weights, routing, batch_invariant=batch_invariant)
