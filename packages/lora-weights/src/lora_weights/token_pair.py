"""Replaced rows of an embedding as a pair: one rank for each token.

Row t of the table becomes ``new[t] = old[t] + delta[t]``, so with the tokens' one-hot rows U

    embedding   lora_a = U `[n, V]`,      lora_b = delta^T `[D, n]`
    tied head   lora_a = delta `[n, D]`,  lora_b = U^T `[V, n]`

(``peft/tuners/trainable_tokens/layer.py``, ``get_merged_weights``.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lora_weights.modules import LoraPair

if TYPE_CHECKING:
    from lora_weights.modules import TokenRows


def token_pair(rows: TokenRows, table: torch.Tensor, *, is_embedding: bool) -> LoraPair:
    """Return the pair that replaces rows of a table.

    Args:
        rows: tokens and their new values, `[n, D]`.
        table: the base's weight, `[V, D]`.
        is_embedding: whether the module looks rows up, or is a head that multiplies by them.
    """
    ids = rows.token_ids.to(table.device)
    delta = rows.rows.float() - table[ids].float().cpu()
    one_hot = torch.zeros(len(ids), table.shape[0])
    one_hot[torch.arange(len(ids)), rows.token_ids] = 1.0
    if is_embedding:
        return LoraPair(lora_a=one_hot, lora_b=delta.T.contiguous(), is_embedding=True)
    return LoraPair(lora_a=delta, lora_b=one_hot.T.contiguous())


def join_pairs(first: LoraPair | None, second: LoraPair) -> LoraPair:
    """Return one pair that adds what both add: their ranks side by side."""
    if first is None:
        return second
    return LoraPair(
        lora_a=torch.cat([first.lora_a.to(second.lora_a.dtype), second.lora_a]),
        lora_b=torch.cat([first.lora_b.to(second.lora_b.dtype), second.lora_b], dim=1),
        is_embedding=second.is_embedding,
    )
