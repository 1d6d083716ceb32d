"""Tensor parallel inside the experts: what one rank keeps of each pair.

w1 and w3 are column layers, w2 is a row layer. Gate and up are cut each for itself, whether a file
or a base has them in halves or in even and odd rows.

Shapes: `X` experts, `r` rank, `H` hidden size, `F` intermediate size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_weights.experts.convert import join_w13, split_w13
from lora_weights.experts.parts import ExpertPair, ExpertPart

if TYPE_CHECKING:
    from lora_weights.sharding import TensorParallel


def shard_experts(part: ExpertPart, parallel: TensorParallel) -> ExpertPart:
    """Return what one rank keeps of the experts' pairs, as views.

    w1, w3: A whole, B `[X, F/tp, r]`; fully sharded also A `[X, r/tp, H]`.
    w2: A `[X, r, F/tp]`, B whole; fully sharded also B `[X, H/tp, r]`.

    Args:
        part: the pairs of the whole layer (of the experts of this rank).
        parallel: the rank.

    Raises:
        ValueError: `F`, `H` or `r` does not divide by the ranks; names both numbers.
    """

    def shard(name: str, pair: ExpertPair) -> ExpertPair:
        return _shard_down(pair, parallel) if name == "w2" else _shard_up(name, pair, parallel)

    return part if parallel.size == 1 else part.map_pairs(shard)


def shard_w13(pair: ExpertPair, parallel: TensorParallel, *, is_interleaved: bool) -> ExpertPair:
    """Return what one rank keeps of a pair of fused gate and up, as a pair of the same layout.

    B `[X, 2F, r]` becomes `[X, 2F/tp, r]`: this rank's rows of the gate and of the up projection.

    Args:
        pair: the fused pair of the whole layer.
        parallel: the rank.
        is_interleaved: gate in the even rows and up in the odd ones, not in halves.

    Raises:
        ValueError: as for `shard_experts`, or the number of rows is odd.
    """
    w1, w3 = split_w13(pair, is_interleaved=is_interleaved)
    shard = shard_experts(ExpertPart(w1=w1, w3=w3), parallel)
    return join_w13(shard.w1, shard.w3, is_interleaved=is_interleaved)


def _shard_up(name: str, pair: ExpertPair, parallel: TensorParallel) -> ExpertPair:
    start, end = parallel.share(pair.lora_b.shape[1], f"the number of rows of {name}")
    lora_a = pair.lora_a
    if parallel.is_fully_sharded:
        first, last = parallel.share(pair.rank, f"the rank of {name}")
        lora_a = lora_a[:, first:last]
    return ExpertPair(lora_a=lora_a, lora_b=pair.lora_b[:, start:end])


def _shard_down(pair: ExpertPair, parallel: TensorParallel) -> ExpertPair:
    start, end = parallel.share(pair.lora_a.shape[2], "the number of input columns of w2")
    lora_b = pair.lora_b
    if parallel.is_fully_sharded:
        first, last = parallel.share(lora_b.shape[1], "the number of output rows of w2")
        lora_b = lora_b[:, first:last]
    return ExpertPair(lora_a=pair.lora_a[:, :, start:end], lora_b=lora_b)
