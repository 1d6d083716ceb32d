"""A base product and its LoRA part in one kernel: against float64, and rows that do not mix."""

from __future__ import annotations

import ctypes
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lora_kernels import StackedWeights, build_routing
from lora_kernels._native.kernels import native_kernels
from lora_kernels._native.linear import module_table, step_table
from lora_kernels.native import PackedProduct, load_library, why_not_native

if TYPE_CHECKING:
    from collections.abc import Sequence

HAS_PRODUCT = why_not_native() is None and native_kernels().has_product
SOURCE = """
#include "lora_product.h"

extern "C" void run(const bf16* weight, const float* bias, int64_t num_out, int64_t num_in,
                    const lora::Module* m, const lora::Step* s, const bf16* x, int64_t num_rows,
                    bf16* y) {
  lora::Plan plan;
  lora::Pieces pieces;
  plan.make(*m, *s);
  pieces.make(*s, num_rows);
  std::vector<float> kept(lora::tiles::MAX_KEPT_ROWS * num_out + 16);
#pragma omp parallel
  lora::run({weight, bias, num_out, num_in}, {x, num_in, num_rows, nullptr}, y, num_out, *m, *s,
            plan, pieces, kept.data());
}
"""
TILE, NUM_IN = 16, 96
WIDTHS = (96, 32, 48)
RANKS = ((16, 16, 16), (1, 8, 17), (64, 0, 3), (0, 0, 0), (8, 64, 0), (5, 33, 16))
"""By slot, of the slices."""
BASE = -1
LAYOUTS: dict[str, Sequence[tuple[int, int]]] = {
    "few": [(0, 2), (1, 2), (BASE, 3), (2, 1), (4, 5), (5, 3)],
    "one adapter": [(1, 70)],
    "short runs": [(slot % 7 - 1, 1 + slot % 5) for slot in range(35)],
    "several in a tile": [(2, 23), (0, 3), (BASE, 2), (4, 9), (1, 40), (5, 30), (3, 4), (0, 7)],
    "one, the base, another": [(0, 33), (BASE, 40), (2, 57)],
    "many": [(0, 100), (1, 29), (BASE, 7), (4, 130), (2, 3), (5, 40)],
}
"""Runs of rows: slot, how many."""


def slots_of(layout: str) -> list[int]:
    return [slot for slot, count in LAYOUTS[layout] for _ in range(count)]


@cache
def kernel() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "joint.cpp"
        source.write_text(SOURCE)
        function = load_library([source], cache_dir=Path(folder) / "cache").run
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, size, size, pointer, pointer, pointer, size, pointer]
    function.restype = None
    return function


class Joint:
    """A projection of three slices with an adapter in each of its slots."""

    def __init__(self, *, widths: Sequence[int] = WIDTHS, has_bias: bool = True) -> None:
        torch.manual_seed(1)
        self.weight = torch.randn(sum(widths), NUM_IN).bfloat16()
        self.bias = torch.randn(sum(widths)).bfloat16() if has_bias else None
        self.product = PackedProduct(self.weight, self.bias)
        self.slots = StackedWeights.allocate(
            num_slots=len(RANKS),
            max_rank=64,
            in_features=NUM_IN,
            out_features=list(widths),
            dtype=torch.bfloat16,
            device="cpu",
        )
        for slot, ranks in enumerate(RANKS):
            pairs = [
                (torch.randn(rank, NUM_IN), torch.randn(width, rank)) if rank else None
                for rank, width in zip(ranks, widths, strict=True)
            ]
            self.slots.write_slot(slot, pairs)

    def run(self, x: torch.Tensor, slots: Sequence[int], order: Sequence[int] = ()) -> torch.Tensor:
        """Return y; `order` is that of the entries, by row."""
        used = [row for row in order or range(len(slots)) if slots[row] != BASE]
        routing = build_routing(
            token_idx=used,
            slots=[slots[row] for row in used],
            num_tokens=len(slots),
            num_slots=len(RANKS),
        )
        padded = torch.full((-(-len(x) // TILE) * TILE, NUM_IN), torch.nan, dtype=x.dtype)
        padded[: len(x)] = x
        y = torch.full((len(x), len(self.weight)), torch.nan, dtype=x.dtype)
        weight, bias = self.product.addresses
        kernel()(
            weight,
            bias or None,
            *self.weight.shape,
            module_table(self.slots)[0],
            step_table(routing)[0],
            padded.data_ptr(),
            len(x),
            y.data_ptr(),
        )
        return y

    def exact(self, x: torch.Tensor, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y in float64, and the sums of the absolute values of what is added up."""
        exact = x.double() @ self.weight.double().T
        size = x.double().abs() @ self.weight.double().abs().T
        if self.bias is not None:
            exact += self.bias.double()
        for row, slot in enumerate(slots):
            if slot == BASE:
                continue
            for p, (begin, end) in enumerate(self.slots.out_ranges):
                a, b = (side[p][slot].double() for side in (self.slots.lora_a, self.slots.lora_b))
                exact[row, begin:end] += b @ (a @ x[row].double())
                size[row, begin:end] += b.abs() @ (a.abs() @ x[row].double().abs())
        return exact, size


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, NUM_IN, generator=torch.Generator().manual_seed(count)).bfloat16()


if HAS_PRODUCT:

    @pytest.mark.parametrize("has_bias", [False, True])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_both_parts_are_added_with_one_rounding(layout: str, *, has_bias: bool) -> None:
        joint, slots = Joint(has_bias=has_bias), slots_of(layout)
        x = rows(len(slots))
        exact, size = joint.exact(x, slots)
        # One rounding to 8 bits; before it float32 sums of v's with 16.
        bound = exact.abs() * 2**-8 + size * 2**-16
        assert bool(((joint.run(x, slots).double() - exact).abs() <= bound).all())

    def test_slices_that_share_a_pair_of_tiles_are_added_all_the_same() -> None:
        joint, slots = Joint(widths=(80, 48, 16)), slots_of("several in a tile")
        x = rows(len(slots))
        exact, size = joint.exact(x, slots)
        base, _ = joint.exact(x, [BASE] * len(slots))
        bound = (base.abs() + exact.abs()) * 2**-8 + size * 2**-16  # each part is rounded
        assert bool(((joint.run(x, slots).double() - exact).abs() <= bound).all())

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_row_has_the_same_bits_alone_and_in_any_company(layout: str) -> None:
        joint, slots = Joint(), slots_of(layout)
        x = rows(len(slots))
        alone = torch.cat(
            [joint.run(x[row : row + 1], slots[row : row + 1]) for row in range(len(slots))]
        )
        assert torch.equal(joint.run(x, slots), alone)
        for cut in (5, 16, 17, len(slots) // 2):
            assert torch.equal(joint.run(x[cut:], slots[cut:]), alone[cut:])

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_rows_without_an_adapter_are_the_base_products(layout: str) -> None:
        joint, slots = Joint(), slots_of(layout)
        x = rows(len(slots))
        found, base = joint.run(x, slots), joint.product(x)
        for row, slot in enumerate(slots):
            for p, (begin, end) in enumerate(joint.slots.out_ranges):
                if slot == BASE or not RANKS[slot][p]:
                    assert torch.equal(found[row, begin:end], base[row, begin:end])

    @pytest.mark.parametrize("number", [torch.nan, torch.inf])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_what_is_not_finite_in_an_adapter_reaches_no_row_of_another(
        layout: str, number: float
    ) -> None:
        joint, slots = Joint(), slots_of(layout)
        x, broken = rows(len(slots)), 1
        before = joint.run(x, slots)
        for side in (*joint.slots.lora_a, *joint.slots.lora_b):
            side[broken] = number
        after = joint.run(x, slots)
        others = [row for row, slot in enumerate(slots) if slot != broken]
        assert torch.equal(before[others], after[others])
        mine = [row for row, slot in enumerate(slots) if slot == broken]
        assert not after[mine].isfinite().any()

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_entries_may_come_in_any_order_of_rows(layout: str) -> None:
        joint, slots = Joint(), slots_of(layout)
        x = rows(len(slots))
        order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(0)).tolist()
        assert torch.equal(joint.run(x, slots, order), joint.run(x, slots))
        shuffled = [slots[row] for row in order]
        assert torch.equal(joint.run(x[order], shuffled), joint.run(x, slots)[order])
