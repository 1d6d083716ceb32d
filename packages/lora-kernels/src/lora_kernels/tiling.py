"""Tile: how much of each axis one program of a GPU kernel takes, by shape.

The rows follow from the resources of A100 and H200 and from what Triton 3.9 compiles for sm_80 and
sm_90: registers a thread, spilled bytes, shared memory. Times are not measured yet;
`python -m lora_kernels.bench` on a GPU is what a changed row must cite.

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
        # Sums stay in registers, 4096 over 128 threads: 90 to 128 registers, no spills; twice as
        # many sums take 160 to 228. 128 columns or more keep each read of A at 256 bytes or more.
        block_r = block_of_ranks(max_rank, 32)
        return Tile(block_r=block_r, block_i=4096 // block_r)
    block_r = block_of_ranks(max_rank, 64)
    # 128 bytes of a row of x and A a step in the long tiles, 256 in the short ones, which wait for
    # A; at most 48 KiB of shared memory over three stages, no spills in any dtype.
    row_bytes = 128 if tile == LARGE_TILE else 256
    return Tile(block_t=tile, block_r=block_r, block_i=row_bytes // element_size, num_stages=3)


def expand_tile(tile: int, max_rank: int) -> Tile:
    """Return the block sizes of expand.

    Args:
        tile: rows of a tile; 1 is BGMV.
        max_rank: `R`.
    """
    if tile == ROW_TILE:
        # 128 columns are 256 contiguous bytes of a row of B in 16 bits, and narrow enough that one
        # token at O = 4096 has 32 programs. 32 to 114 registers, no spills.
        return Tile(block_r=block_of_ranks(max_rank, 32), block_o=128)
    if tile == LARGE_TILE:
        # 109 to 205 registers, no spills. The same with 128 columns or 64 ranks on four warps
        # spills up to 860 bytes a thread: pointers to v are 64 bits, and v is there twice.
        return Tile(block_t=tile, block_r=block_of_ranks(max_rank, 32), block_o=64, num_warps=8)
    # 72 to 150 registers, no spills but 16 bytes at 16 ranks on sm_80.
    return Tile(block_t=tile, block_r=block_of_ranks(max_rank, 64), block_o=128)


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
