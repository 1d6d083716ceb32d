"""What the ways of computing a step cost on a CPU, in microseconds, to choose between them.

Letters: `T` tokens, `S` entries of a segment, `F` ranks summed over entries, `I` in, `O` out.

The constants were fitted to medians on two cores of an Intel Xeon (Sapphire Rapids class, AVX-512
and AMX, 2.6 GHz, torch 2.15), each call right after the base product of its module with neither
code nor weights in the cache, over T in {16, 64, 128, 512}, one to eight segments of rank 16 and
the modules of SmolLM2-135M. They need to be right within a factor of two only: the candidates
differ by more wherever the choice matters.
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

    elementwise: float
    """One elementwise call, whatever its size (not per thousand)."""

    other_code: float
    """Running other code than bags (not per thousand), which nobody has brought into the cache."""

    weight: float
    """Weight elements read."""

    segment: float
    """What a segment costs beside its two products (not per thousand)."""

    shrink_mac: float
    """Multiply-adds in a product with A."""

    expand_mac: float
    """Multiply-adds in a product with B, whose many columns suit AMX better."""

    product_in: float
    """Activations read by a matrix product."""

    product_out: float
    """Outputs updated by a matrix product."""

    element: float
    """Elements of an elementwise call."""

    bag_piece: float
    """Pieces of rows of B summed in bags."""

    bag_mac: float
    """Multiply-adds in bags."""

    bag_out: float
    """Outputs of bags written and then added to the base output."""

    def shrink(self, num_rows: int, num_ranks: int, in_features: int) -> float:
        """One product of `num_rows` activations with `num_ranks` rows of A."""
        weights, inputs = num_ranks * in_features / 1e3, num_rows * in_features / 1e3
        return (
            self.product
            + weights * (self.weight + num_rows * self.shrink_mac)
            + inputs * self.product_in
        )

    def expand(self, num_rows: int, num_ranks: int, out_features: int) -> float:
        """One product with rows of B, added to the output."""
        weights, outputs = num_ranks * out_features / 1e3, num_rows * out_features / 1e3
        return (
            self.product
            + weights * (self.weight + num_rows * self.expand_mac)
            + outputs * self.product_out
        )

    def multiply(self, num_elements: int) -> float:
        """One elementwise product."""
        return self.elementwise + num_elements * self.element / 1e3

    def in_bag(self, num_rows: int, rank: int, out_features: int, chunk: int) -> float:
        """Weighted sums of a slot's rows of B, in pieces of `chunk`, for a segment."""
        weights = rank * out_features / 1e3
        macs = weights * num_rows
        return weights * self.weight + macs * (self.bag_mac + self.bag_piece / chunk)


# oneDNN builds a primitive descriptor at every 16-bit product (35 us with everything in the
# cache), MKL's sgemm starts at once; a multiply-add in float32 takes five times longer.
_BFLOAT16 = Costs(
    product=50,
    bag=60,
    elementwise=20,
    other_code=60,
    weight=0.15,
    segment=40,
    shrink_mac=0.0025,
    expand_mac=0.001,
    product_in=0.1,
    product_out=0.2,
    element=0.2,
    bag_piece=6,
    bag_mac=0.035,
    bag_out=0.8,
)
_FLOAT32 = Costs(
    product=25,
    bag=60,
    elementwise=20,
    other_code=60,
    weight=0.3,
    segment=40,
    shrink_mac=0.0125,
    expand_mac=0.0125,
    product_in=0.1,
    product_out=0.2,
    element=0.3,
    bag_piece=6,
    bag_mac=0.06,
    bag_out=1.0,
)


def costs_of(dtype: torch.dtype) -> Costs:
    """Return the constants for products in `dtype`, bfloat16 or float32."""
    return _BFLOAT16 if dtype == torch.bfloat16 else _FLOAT32
