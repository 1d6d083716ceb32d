"""The native kernels: the compiler's folder, the packed product, and rows that do not mix.

That they compute what the other backends compute is shown by the tests over the fixture `backend`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_kernels import (
    Backend,
    BackendUnavailableError,
    StackedWeights,
    UnsupportedShapeError,
    apply_lora_,
    build_routing,
)
from lora_kernels._native import compiler
from lora_kernels._native.kernels import native_kernels
from lora_kernels.native import PackedProduct, load_library, why_not_native

if TYPE_CHECKING:
    from pathlib import Path

IS_NATIVE = why_not_native() is None
HAS_PRODUCT = IS_NATIVE and native_kernels().has_product


def write_source(folder: Path, text: str) -> Path:
    source = folder / "answer.cpp"
    source.write_text(text)
    return source


ANSWER = 'extern "C" int answer() { return 42; }\n'


def test_a_library_is_compiled_once_and_found_again(tmp_path: Path) -> None:
    source, cache = write_source(tmp_path, ANSWER), tmp_path / "cache"
    assert load_library([source], cache_dir=cache).answer() == 42
    first = [(file, file.stat().st_mtime_ns) for file in cache.iterdir()]
    assert load_library([source], cache_dir=cache).answer() == 42
    assert [(file, file.stat().st_mtime_ns) for file in cache.iterdir()] == first
    assert len(first) == 1


def test_another_source_makes_another_library(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    load_library([write_source(tmp_path, ANSWER)], cache_dir=cache)
    changed = write_source(tmp_path, ANSWER.replace("42", "43"))
    assert load_library([changed], cache_dir=cache).answer() == 43


def test_what_the_compiler_says_is_in_the_error_and_nothing_is_left(tmp_path: Path) -> None:
    source = write_source(tmp_path, "#error this processor has no such thing\n")
    with pytest.raises(BackendUnavailableError, match="no such thing"):
        load_library([source], cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error_of_the_backend(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(BackendUnavailableError, match="cache"):
        load_library([write_source(tmp_path, ANSWER)], cache_dir=tmp_path / "cache")


def test_a_system_without_a_compiler_is_told_which_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailableError, match=r"no C\+\+ compiler.*g\+\+"):
        load_library([write_source(tmp_path, ANSWER)], cache_dir=tmp_path)


def test_a_compiler_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "c++"
    slow.write_text('#!/bin/sh\ncase "$1" in --version) echo 1;; *) exec sleep 30;; esac\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(compiler, "TIMEOUT_S", 0.5)
    with pytest.raises(BackendUnavailableError, match="longer than"):
        load_library([write_source(tmp_path, ANSWER)], cache_dir=tmp_path / "cache")


if IS_NATIVE:

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @given(
        slots=st.lists(st.integers(-1, 4), min_size=1, max_size=40),
        ranks=st.lists(st.integers(0, 19), min_size=5, max_size=5),
        seed=st.integers(0, 2**31),
    )
    @settings(max_examples=40, deadline=None)
    def test_a_row_has_the_same_bits_alone_and_among_any_neighbours(
        dtype: torch.dtype, slots: list[int], ranks: list[int], seed: int
    ) -> None:
        torch.manual_seed(seed)
        weights = make_weights(ranks, dtype)
        x, y = torch.randn(len(slots), 70, dtype=dtype), torch.randn(len(slots), 91, dtype=dtype)
        together = run(weights, x, y, slots)
        for row in range(len(slots)):
            alone = run(weights, x[row : row + 1], y[row : row + 1], slots[row : row + 1])
            assert torch.equal(together[row], alone[0])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("in_features", [64, 70, 96])
    @pytest.mark.parametrize("counts", [[1, 1], [2, 16], [17, 15], [33, 100], [64, 0]])
    def test_pairs_are_added_with_one_rounding_whatever_the_rows_and_ranks(
        dtype: torch.dtype, in_features: int, counts: list[int]
    ) -> None:
        torch.manual_seed(in_features)
        ranks = [5, 40]
        weights = make_weights(ranks, dtype, in_features=in_features, max_rank=40)
        slots = [0] * counts[0] + [1] * counts[1]
        x, y = make_rows(len(slots), in_features, dtype)
        found = run(weights, x, y, slots).double()
        exact, size = y.double(), y.double().abs()
        for row, slot in enumerate(slots):
            for p, (begin, end) in enumerate(weights.out_ranges):
                a, b = (side[p][slot].double() for side in (weights.lora_a, weights.lora_b))
                v = a @ x[row].double()
                exact[row, begin:end] += b @ v
                size[row, begin:end] += b.abs() @ (a.abs() @ x[row].double().abs())
        # float32 sums; of bfloat16, v with 16 bits and the result with 8.
        bound = size * (2**-15 if dtype is torch.bfloat16 else 2**-20)
        if dtype is torch.bfloat16:
            bound += exact.abs() * 2**-8
        assert bool(((found - exact).abs() <= bound).all())

    @pytest.mark.parametrize("in_features", [64, 70])
    def test_a_row_has_the_same_bits_in_segments_of_any_length(in_features: int) -> None:
        dtype = torch.bfloat16
        weights = make_weights([3, 40, 16], dtype, in_features=in_features, max_rank=40)
        x, y = make_rows(120, in_features, dtype)
        for slot in range(3):
            alone = [run(weights, x[row : row + 1], y[row : row + 1], [slot]) for row in range(120)]
            for count in (2, 15, 16, 17, 32, 49, 120):
                together = run(weights, x[:count], y[:count], [slot] * count)
                assert torch.equal(together, torch.cat(alone[:count]))
                scattered = [slot if row % 2 else -1 for row in range(count)]
                apart = run(weights, x[:count], y[:count], scattered)
                assert torch.equal(apart[1::2], together[1::2])

    @pytest.mark.parametrize("count", [1, 16, 40])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_numbers_of_other_slots_and_behind_the_rank_are_not_used(
        count: int, dtype: torch.dtype
    ) -> None:
        weights = make_weights([3, 5, 16], dtype, in_features=70, max_rank=40)
        x, y = make_rows(count, 70, dtype)
        before = run(weights, x, y, [1] * count)
        with torch.no_grad():
            for side in (*weights.lora_a, *weights.lora_b):
                side[[0, 2]] = torch.nan
            for a, b in zip(weights.lora_a, weights.lora_b, strict=True):
                a[1, 5:], b[1, :, 5:] = torch.nan, torch.nan
        assert torch.equal(before, run(weights, x, y, [1] * count))

    def test_a_row_that_is_not_finite_reaches_no_other_row() -> None:
        weights = make_weights([3, 19, 1, 0, 8], torch.bfloat16)
        x = torch.randn(24, 70, dtype=torch.bfloat16)
        y = torch.randn(24, 91, dtype=torch.bfloat16)
        slots = [row % 5 for row in range(24)]
        before = run(weights, x, y, slots)
        x[6], x[13] = torch.nan, torch.inf
        after = run(weights, x, y, slots)
        others = [row for row in range(24) if row not in {6, 13}]
        assert torch.equal(before[others], after[others])
        assert after[6].isnan().any()

    @pytest.mark.parametrize("what", ["y", "x", "dtype"])
    def test_what_the_kernel_does_not_take_is_computed_all_the_same(what: str) -> None:
        weights = make_weights([3, 19, 1, 2, 8], torch.float32)
        x, y = torch.randn(6, 70), torch.randn(6, 91)
        expected = run(weights, x, y, [0, 1, 2, 3, 4, -1])
        if what == "y":
            y = y.t().contiguous().t()
        elif what == "x":
            x = x.t().contiguous().t()
        else:
            x, y = x.double().float(), y.bfloat16()
        found = run(weights, x, y, [0, 1, 2, 3, 4, -1])
        tolerance = 1e-4 if what != "dtype" else 0.5
        torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=0.02)


if HAS_PRODUCT:

    @pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 31, 32, 33, 100])
    @pytest.mark.parametrize(("num_in", "num_out"), [(32, 16), (64, 48), (576, 960)])
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_the_packed_product_is_the_rounded_exact_one(
        num_rows: int, num_in: int, num_out: int, *, has_bias: bool
    ) -> None:
        torch.manual_seed(num_rows)
        x = torch.randn(num_rows, num_in).bfloat16()
        weight = torch.randn(num_out, num_in).bfloat16()
        bias = torch.randn(num_out).bfloat16() if has_bias else None
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        found = PackedProduct(weight, bias)(x)
        # One rounding to eight bits, and float32 sums before it.
        bound = exact.abs() * 2**-8 + 1e-5 * (x.double().abs() @ weight.double().abs().T) + 1e-6
        assert bool(((found.double() - exact).abs() <= bound).all())

    @pytest.mark.parametrize(("num_in", "num_out"), [(96, 80), (1536, 48)])
    def test_a_row_of_the_packed_product_has_the_same_bits_in_any_number_of_rows(
        num_in: int, num_out: int
    ) -> None:
        product = PackedProduct(torch.randn(num_out, num_in).bfloat16())
        x = torch.randn(600, num_in).bfloat16()
        alone = torch.stack([product(x[row]) for row in range(600)])
        # Sizes that threads share by outputs and by rows, and that take one block or several.
        for num_rows in (2, 15, 16, 17, 33, 70, 128, 250, 257, 600):
            assert torch.equal(product(x[:num_rows]), alone[:num_rows])

    @pytest.mark.parametrize("num_rows", [16, 40, 300])
    def test_a_row_that_is_not_finite_reaches_no_other_row_of_the_packed_product(
        num_rows: int,
    ) -> None:
        product = PackedProduct(torch.randn(80, 96).bfloat16())
        x = torch.randn(num_rows, 96).bfloat16()
        before = product(x)
        x[3], x[num_rows - 1] = torch.nan, torch.inf
        after = product(x)
        others = [row for row in range(num_rows) if row not in {3, num_rows - 1}]
        assert torch.equal(after[others], before[others])
        assert bool(after[3].isnan().all())

    def test_the_packed_product_takes_rows_with_strides_and_more_dimensions() -> None:
        product = PackedProduct(torch.randn(80, 96).bfloat16())
        wide = torch.randn(5, 7, 200).bfloat16()
        assert torch.equal(
            product(wide[..., 3:99]).view(35, 80),
            product(wide[..., 3:99].contiguous().view(35, 96)),
        )
        assert torch.equal(
            product(wide.permute(2, 1, 0)[:96].permute(2, 1, 0)), product(wide[..., :96])
        )

    @pytest.mark.parametrize(
        "weight",
        [
            torch.zeros(16, 31, dtype=torch.bfloat16),
            torch.zeros(17, 32, dtype=torch.bfloat16),
            torch.zeros(16, 32),
        ],
    )
    def test_weights_that_do_not_fit_tiles_are_refused(weight: torch.Tensor) -> None:
        with pytest.raises(UnsupportedShapeError, match="multiples"):
            PackedProduct(weight)

    def test_inputs_of_another_width_or_type_are_refused() -> None:
        product = PackedProduct(torch.zeros(16, 32, dtype=torch.bfloat16))
        for x in (torch.zeros(2, 31, dtype=torch.bfloat16), torch.zeros(2, 32)):
            with pytest.raises(UnsupportedShapeError, match="expected"):
                product(x)


def make_weights(
    ranks: list[int], dtype: torch.dtype, *, in_features: int = 70, max_rank: int = 19
) -> StackedWeights:
    """Five slots of a module with slices of 64, 20 and 7; the second slice has no pair."""
    weights = StackedWeights.allocate(
        num_slots=5,
        max_rank=max_rank,
        in_features=in_features,
        out_features=[64, 20, 7],
        dtype=dtype,
        device="cpu",
    )
    for slot, rank in enumerate(ranks):
        if rank:
            first = torch.randn(rank, in_features), torch.randn(64, rank)
            last = torch.randn(1, in_features), torch.randn(7, 1)
            weights.write_slot(slot, [first, None, last])
    return weights


def make_rows(
    count: int, in_features: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x and y for `make_weights`."""
    return torch.randn(count, in_features).to(dtype), torch.randn(count, 91).to(dtype)


def run(
    weights: StackedWeights, x: torch.Tensor, y: torch.Tensor, slots: list[int]
) -> torch.Tensor:
    used = [(row, slot) for row, slot in enumerate(slots) if slot >= 0]
    routing = build_routing(
        token_idx=[row for row, _ in used],
        slots=[slot for _, slot in used],
        num_tokens=len(slots),
        num_slots=5,
    )
    out = y.clone()
    with torch.inference_mode():
        return apply_lora_(out, x, weights, routing, backend=Backend.NATIVE)
