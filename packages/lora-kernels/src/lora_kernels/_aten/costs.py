"""What the ways of computing a step cost on a CPU, in microseconds, to choose between them.

Letters: `T` tokens, `S` entries of a segment, `F` ranks summed over entries, `I` in, `O` out.

The constants were fitted to medians on one core of an Intel Xeon (Sapphire Rapids class, AVX-512
and AMX, 2.6 GHz, torch 2.15), weights not in the cache, over T in {1, 16, 64, 512}, ranks in
{8, 16, 64}, I = 576 and O in {192, 1536}. They need to be right within a factor of two only: the
candidates differ by more wherever the choice matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The constants of one dtype. Times in microseconds for a thousand of the thing named."""

    product: float
    """One matrix product, whatever its size (not per thousand)."""

    bag: float
    """One call of embedding bags, whatever its size (not per thousand)."""

    weight: float
    """Weight elements read."""

    product_mac: float
    """Multiply-adds in a matrix product."""

    product_out: float
    """Outputs updated by a matrix product."""

    bag_piece: float
    """Pieces of rows of B summed in bags."""

    bag_mac: float
    """Multiply-adds in bags."""

    bag_out: float
    """Outputs of bags written and then added to the base output."""

    def shrink(self, num_rows: int, num_ranks: int, in_features: int) -> float:
        """One product of `num_rows` activations with `num_ranks` rows of A."""
        weights = num_ranks * in_features / 1e3
        return self.product + weights * (self.weight + num_rows * self.product_mac)

    def expand(self, num_rows: int, rank: int, out_features: int) -> float:
        """One product of a segment with a slot's B, added to the output."""
        weights = rank * out_features / 1e3
        outputs = num_rows * out_features / 1e3
        return (
            self.product
            + weights * (self.weight + num_rows * self.product_mac)
            + outputs * self.product_out
        )

    def in_bag(self, num_rows: int, rank: int, out_features: int, chunk: int) -> float:
        """Weighted sums of a slot's rows of B, in pieces of `chunk`, for a segment."""
        weights = rank * out_features / 1e3
        macs = weights * num_rows
        return weights * self.weight + macs * (self.bag_mac + self.bag_piece / chunk)


# oneDNN builds a primitive descriptor at every 16-bit product, MKL's sgemm starts at once: a
# float32 product starts four times faster, and each multiply-add takes five times longer.
_BFLOAT16 = Costs(
    product=42,
    bag=20,
    weight=0.15,
    product_mac=0.002,
    product_out=0.2,
    bag_piece=6,
    bag_mac=0.035,
    bag_out=1.2,
)
_FLOAT32 = Costs(
    product=10,
    bag=20,
    weight=0.3,
    product_mac=0.0125,
    product_out=0.2,
    bag_piece=6,
    bag_mac=0.06,
    bag_out=1.4,
)


def costs_of(dtype: torch.dtype) -> Costs:
    """Return the constants for products in `dtype`, bfloat16 or float32."""
    return _BFLOAT16 if dtype == torch.bfloat16 else _FLOAT32
