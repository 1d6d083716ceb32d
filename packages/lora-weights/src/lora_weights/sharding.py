"""Tensor parallel: what one rank keeps of a packed module, for every kind of base layer.

Pure functions; views where the rows or columns are in one piece. Collectives are the caller's.
Default: B is cut by rows (column layers) or A by columns (row layers), with no traffic of its own.
Fully sharded: the other factor is cut too. A column layer keeps a share of A's rows, and its
shrunk activations are gathered along the rank before the expand; a row layer keeps a share of B's
rows, and its shrunk activations are summed over ranks before the expand.

Shapes: `P` slices, `R` max rank, `r` rank of a pair, `I` in, `O` out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from lora_weights.modules import FullModule, LoraPair
from lora_weights.packing import PackedPart
from lora_weights.rows import Span, take_part

if TYPE_CHECKING:
    from lora_weights.bound import BoundPart


class ShardKind(StrEnum):
    """How the base cuts a layer over ranks."""

    REPLICATED = "replicated"
    """Every rank has all of it, whatever the number of ranks."""
    COLUMN = "column"
    """Output rows are cut: one slice or two, each for itself."""
    VARIABLE = "variable"
    """As column, with any number of slices; not offered fully sharded."""
    QKV = "qkv"
    """Query rows are cut; key and value heads too, or repeated where ranks outnumber them."""
    ROW = "row"
    """Input columns are cut; outputs are summed over ranks."""
    EMBEDDING = "embedding"
    """The pair is on every rank, however the base's rows are spread."""
    LOGITS = "logits"
    """The pair is on every rank; it is applied to the gathered logits."""
    HEAD = "head"
    """A classification head: every rank has all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """One rank of a tensor-parallel group."""

    size: int
    """Ranks in the group, at least 1."""
    rank: int
    """Which of them, from 0."""
    is_fully_sharded: bool = False
    """Whether both factors are cut, at the price of traffic between shrink and expand."""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of a group of {self.size}")

    def share(self, count: int, what: str) -> Span:
        """Return this rank's span of `count` things that are cut evenly.

        Raises:
            ValueError: they do not divide by the ranks; names both numbers.
        """
        if count % self.size:
            raise ValueError(f"{what} is {count}, expected a multiple of {self.size} (ranks)")
        step = count // self.size
        return self.rank * step, (self.rank + 1) * step


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """One layer of the base before it is cut."""

    kind: ShardKind
    """How it is cut."""
    sizes: tuple[int, ...]
    """`P` numbers: output rows of each slice of the whole layer; for qkv those of q, k and v."""
    num_kv_heads: int = 0
    """Heads of key and of value in the whole layer; for qkv only."""


def shard_packed(
    packed: PackedPart,
    layout: ShardLayout,
    parallel: TensorParallel,
    *,
    max_rank: int | None = None,
) -> PackedPart:
    """Return what one rank keeps of a packed module.

    Args:
        packed: the whole module's part: one part a slice, or a single one for all slices, whose
            rows are then cut slice by slice and joined.
        layout: the whole layer.
        parallel: the rank.
        max_rank: `R`, by which the rows of A are shared out when fully sharded, so that all
            adapters are cut at the same places; a pair of smaller rank ends in an earlier rank.
            None shares out each pair's own rows.

    Raises:
        ValueError: sizes, heads or ranks do not divide by the ranks, the layer is not offered
            fully sharded, or the parts are not those of the layout; names the numbers.
    """
    if layout.kind in _WHOLE or parallel.size == 1:
        return packed
    if layout.kind is ShardKind.ROW:
        parts = [part and _shard_row(part, parallel) for part in packed.parts]
        return PackedPart(parts=tuple(parts))
    spans = output_spans(layout, parallel)
    if len(packed.parts) == 1:
        groups = [_joined(spans, layout.sizes)]
    elif len(packed.parts) == len(spans):
        groups = [[span] for span in spans]
    else:
        raise ValueError(f"{len(packed.parts)} parts, expected 1 or {len(spans)} (slices)")
    parts = [
        part and _shard_column(part, group, parallel, max_rank)
        for part, group in zip(packed.parts, groups, strict=True)
    ]
    return PackedPart(parts=tuple(parts))


def _joined(spans: list[Span], sizes: tuple[int, ...]) -> list[Span]:
    """Return spans of slices as spans of the rows of all slices together."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [(start + low, start + high) for start, (low, high) in zip(starts, spans, strict=True)]


_WHOLE = frozenset({ShardKind.REPLICATED, ShardKind.EMBEDDING, ShardKind.LOGITS, ShardKind.HEAD})


def output_spans(layout: ShardLayout, parallel: TensorParallel) -> list[Span]:
    """Return one rank's rows of every slice, counted from the first row of the slice.

    Raises:
        ValueError: as for `shard_packed`.
    """
    if layout.kind is ShardKind.VARIABLE and parallel.is_fully_sharded:
        raise ValueError(
            f"a layer of {len(layout.sizes)} slices of any size is not offered fully sharded"
        )
    if layout.kind is not ShardKind.QKV:
        return [
            parallel.share(size, f"the size of slice {index}")
            for index, size in enumerate(layout.sizes)
        ]
    query, key, value = layout.sizes
    parallel.share(query * layout.num_kv_heads // key, "the number of query heads")
    heads = _kv_heads(layout.num_kv_heads, parallel)
    return [
        parallel.share(query, "the size of slice 0"),
        *(_head_rows(rows, layout.num_kv_heads, heads) for rows in (key, value)),
    ]


def _kv_heads(num_kv_heads: int, parallel: TensorParallel) -> Span:
    """Return one rank's key (and value) heads: its share, or the one head that it repeats."""
    if num_kv_heads >= parallel.size:
        return parallel.share(num_kv_heads, "the number of kv heads")
    if num_kv_heads < 1 or parallel.size % num_kv_heads:
        raise ValueError(
            f"the number of kv heads is {num_kv_heads}, expected a divisor or a multiple of "
            f"{parallel.size} (ranks)"
        )
    head = parallel.rank // (parallel.size // num_kv_heads)
    return head, head + 1


def _head_rows(rows: int, num_heads: int, heads: Span) -> Span:
    if rows % num_heads:
        raise ValueError(f"{rows} rows, expected a multiple of {num_heads} (kv heads)")
    width = rows // num_heads
    return heads[0] * width, heads[1] * width


def _shard_column(
    part: BoundPart, spans: list[Span], parallel: TensorParallel, max_rank: int | None
) -> BoundPart:
    """Return the output rows of one rank; fully sharded, also its share of A's rows."""
    shard = take_part(part, spans)
    if shard.pair is None or not parallel.is_fully_sharded:
        return shard
    start, end = rank_span(shard.pair.rank, parallel, max_rank=max_rank)
    pair = LoraPair(lora_a=shard.pair.lora_a[start:end], lora_b=shard.pair.lora_b)
    return replace(shard, pair=pair)


def rank_span(rank: int, parallel: TensorParallel, *, max_rank: int | None) -> Span:
    """Return the rows of A that one process keeps of a fully sharded column layer.

    Args:
        rank: the pair's own rank `r`.
        parallel: the process.
        max_rank: `R`, which is shared out; None is `r`.

    Raises:
        ValueError: `R` does not divide by the processes, or is smaller than `r`.
    """
    if max_rank is not None and rank > max_rank:
        raise ValueError(f"rank {rank}, expected at most {max_rank}")
    name = "the rank of the pair" if max_rank is None else "the max rank"
    start, end = parallel.share(rank if max_rank is None else max_rank, name)
    return min(start, rank), min(end, rank)


def _shard_row(part: BoundPart, parallel: TensorParallel) -> BoundPart:
    """Return the input columns of one rank; fully sharded, also its share of B's rows.

    The outputs are summed over ranks: a gain applies to every partial output, a bias to one.
    """
    pair, full = part.pair, part.full
    if pair is not None:
        start, end = parallel.share(pair.in_features, "the number of input columns")
        lora_b = pair.lora_b
        if parallel.is_fully_sharded:
            first, last = parallel.share(pair.out_features, "the number of output rows")
            lora_b = lora_b[first:last]
        pair = LoraPair(lora_a=pair.lora_a[:, start:end], lora_b=lora_b)
    is_first = parallel.rank == 0
    if full is not None:
        start, end = parallel.share(full.weight.shape[1], "the number of input columns")
        bias = full.bias if is_first else None
        full = FullModule(weight=full.weight[:, start:end], bias=bias)
    return replace(part, pair=pair, full=full, bias=part.bias if is_first else None)
