"""One product with the factors of all slots, a mask, and one product back.

Fewer and larger products than one for each slot, for the price of multiply-adds with zeros. Only
where every slot holds moderate numbers (`SlotBounds`), since zero times NaN is NaN.

Letters: `U` tokens with an entry, `N` slots, `P` slices, `I` in, `O` out, `r` a rank,
`F` ranks of all slots, `r * N`, `C` those of all slices, `r * P * N`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from lora_kernels._aten.segments import slice_blocks

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.routing import Routing
    from lora_kernels.weights import StackedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class DensePlan:
    """What one kind of module needs in one step."""

    rank: int
    """So many ranks of every slot are computed: the largest true rank of the step."""

    scales: Tensor
    """Scale of each factor, 0 where its slot has no entry for the token: `[U, C]`; in the dtype of
    the products where all scales are 1, else float32."""

    blocks: Tensor | None
    """1 where a column of the output belongs to the slice, `[P, 1, sum O_p]`: makes B block
    diagonal. Left out for a single slice."""


def plan_dense(
    rank: int, weights: StackedWeights, routing: Routing, dtype: torch.dtype
) -> DensePlan:
    """Build the mask of a step for products in `dtype`."""
    num_rows, num_slices = routing.touched_tokens.shape[0], weights.num_slices
    scales_UN = torch.zeros(num_rows, weights.num_slots, device=routing.device)
    where = (routing.entry_rows, routing.entry_slots)
    scales_UN.index_put_(where, routing.scales, accumulate=True)
    if routing.has_unit_scales and not routing.has_repeated_tokens:
        scales_UN = scales_UN.to(dtype)
    return DensePlan(
        rank=rank,
        scales=scales_UN.repeat(1, rank * num_slices),
        blocks=slice_blocks(weights)[:, None] if num_slices > 1 else None,
    )


def add_dense_(rows_UO: Tensor, x_UI: Tensor, weights: StackedWeights, plan: DensePlan) -> None:
    """Add the LoRA part to the rows of the tokens with an entry."""
    a_CI, b_FO = weights.first_ranks(plan.rank)
    v_UC = linear(x_UI, a_CI)
    v_UC.mul_(plan.scales)
    if plan.blocks is not None:
        b_r1NO = b_FO.view(plan.rank, 1, weights.num_slots, -1)
        b_FO = b_r1NO.mul(plan.blocks).view(v_UC.shape[1], -1)  # [r, P, N, O] -> [C, O]
    rows_UO.addmm_(v_UC, b_FO)
