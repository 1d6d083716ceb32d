"""Tile: how much of each axis one program of a GPU kernel takes, by shape.

The rows follow from the resources of A100 and H200 (registers, shared memory, processors); they
are not measured yet. `python -m lora_kernels.bench` on a GPU is what a changed row must cite.

Letters: `T` entries or rows of a tile, `R` ranks, `I` in, `O` out.
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_kernels.tables import LARGE_TILE, ROW_TILE

PROCESSORS = 132
"""Of an H100 or H200; an A100 has 108. Two programs on each hide the latency of the first loads."""

MAX_SPLITS = 16
"""Each split writes its own sums, which every block of expand reads again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Block sizes and launch options; axes that a kernel lacks are 1."""

    block_t: int = 1
    block_r: int = 1
    block_i: int = 1
    block_o: int = 1
    num_warps: int = 4
    num_stages: int = 2


def block_of_ranks(max_rank: int, most: int) -> int:
    """Return a power of two from 16 to `most` that covers `max_rank` in as few blocks as it can.

    Blocks from a slot's true rank on are left out, so a wide block costs a small rank only the
    lanes that its mask turns off; 16 is the least a matrix instruction takes.
    """
    return min(most, max(16, 1 << (max_rank - 1).bit_length()))


def shrink_tile(tile: int, max_rank: int, element_size: int) -> Tile:
    """Return the block sizes of shrink.

    Args:
        tile: entries of a tile; 1 is BGMV.
        max_rank: `R`.
        element_size: bytes of an element of A and x, the larger of both.
    """
    if tile == ROW_TILE:
        # float32 sums in registers, one lane an element: 4096 over 128 threads are 32 each. The
        # 256 columns are 512 contiguous bytes of a row of A in 16 bits: four full sectors a warp.
        block_r = block_of_ranks(max_rank, 32)
        return Tile(block_r=block_r, block_i=4096 // block_r, num_warps=4, num_stages=2)
    block_r = block_of_ranks(max_rank, 64)
    if tile == LARGE_TILE:
        # (64 + 64) x 64 x 2 bytes x 3 stages = 48 KiB of shared memory: four programs on an H200.
        return Tile(
            block_t=tile, block_r=block_r, block_i=128 // element_size, num_warps=4, num_stages=3
        )
    # (16 + 64) x 128 x 2 bytes x 3 stages = 60 KiB; short segments are bound by reading A.
    return Tile(
        block_t=tile, block_r=block_r, block_i=256 // element_size, num_warps=4, num_stages=3
    )


def expand_tile(tile: int, max_rank: int, element_size: int) -> Tile:
    """Return the block sizes of expand.

    Args:
        tile: rows of a tile; 1 is BGMV.
        max_rank: `R`.
        element_size: bytes of an element of B.
    """
    if tile == ROW_TILE:
        # 16 rows of B x 128 columns: 256 contiguous bytes a row in 16 bits, 16 registers a thread.
        # Narrow blocks of the output give even one token at O = 4096 enough programs (32).
        return Tile(block_r=block_of_ranks(max_rank, 32), block_o=128, num_warps=4, num_stages=2)
    # Sums of 64 x 128 in float32 are 64 registers over 128 threads; float32 factors are bound by
    # the multiply-add units instead of the tensor cores, and take narrower blocks.
    return Tile(
        block_t=tile,
        block_r=block_of_ranks(max_rank, 32 if element_size == 4 else 64),  # noqa: PLR2004 - bytes
        block_o=64 if element_size == 4 else 128,  # noqa: PLR2004 - bytes of float32
        num_warps=4,
        num_stages=2,
    )


def choose_splits(
    num_programs: int, in_features: int, block_i: int, *, batch_invariant: bool
) -> int:
    """Return into how many sums shrink splits its columns, a power of two (split-K).

    A few decode tokens are fewer programs than processors; splitting `I` fills the rest. Each
    split keeps at least two blocks of columns. The parts are added in one fixed order by expand.

    Args:
        num_programs: programs of a launch without splits.
        in_features: `I`.
        block_i: columns a step of the loop takes.
        batch_invariant: let only `I` decide, so that a row's sums never depend on the batch.
    """
    most = min(MAX_SPLITS, in_features // (2 * block_i))
    wanted = 4 if batch_invariant else -(-2 * PROCESSORS // num_programs)
    splits = max(1, min(most, wanted))
    return 1 << (splits.bit_length() - 1)
