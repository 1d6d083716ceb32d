"""Softmax attention written out, for what torch's fused operator has no argument for.

Knows tensors alone: neither caches nor steps. `H` heads, `Q` queries, `L` keys, `D` head width.
"""

from __future__ import annotations

import torch


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend in float32, with soft-capping and sinks.

    Semantics: `softmax(softcap * tanh(scaling * q k^T / softcap) + bias) v`; a sink is one more
    logit of the softmax, without a value.

    Args:
        query: `[..., H, Q, D]`.
        key: `[..., H, L, D]`, or anything that broadcasts to it.
        value: as `key`.
        bias: added to the logits, `[..., H, Q, L]` or anything that broadcasts to it.
        scaling: factor on the logits.
        softcap: bound of the logits; None for none.
        sinks: the sinks' logits, `[..., H, 1, 1]`; None for none.

    Returns:
        `[..., H, Q, D]` in the queries' dtype.
    """
    logits = (query.float() @ key.float().transpose(-1, -2)) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.float()
    if sinks is not None:
        column = sinks.float().expand(*logits.shape[:-1], 1)
        weights = torch.cat((logits, column), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = logits.softmax(dim=-1)
    return (weights @ value.float()).to(query.dtype)
