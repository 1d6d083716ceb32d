"""Fused-target adapters on a split base, split ones on a fused base: exact, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_weights import (
    BoundPart,
    FullModule,
    InvalidAdapterError,
    LoraPair,
    ModuleShape,
    bind_adapter,
    load_adapter,
    pack_parts,
    unpack_parts,
)
from lora_weights.testing import write_adapter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "query_key_value": ("query", "key", "value"),
}
# Eight query heads of 8, two key and value heads of 8; an MLP of 96.
SIZES = {
    "l.attn.qkv_proj": (64, 16, 16),
    "l.mlp.gate_up_proj": (96, 96),
    "l.self_attention.query_key_value": (64, 16, 16),
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(rows: int, *, rank: int = 2, width: int = 8, seed: int = 0) -> BoundPart:
    pair = LoraPair(lora_a=random(rank, width, seed=seed), lora_b=random(rows, rank, seed=seed + 1))
    return BoundPart(pair=pair)


def output(part: BoundPart | None, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return what a module with output y gives with the part, in float64."""
    if part is None:
        return y
    if part.full is not None:
        bias = 0 if part.full.bias is None else part.full.bias
        return x @ part.full.weight.double().T + bias
    if part.pair is not None:
        y = y + x @ part.pair.lora_a.double().T @ part.pair.lora_b.double().T
    gain = 1 if part.gain is None else part.gain.double()
    return y * gain + (0 if part.bias is None else part.bias.double())


def shapes(width: int) -> dict[str, ModuleShape]:
    """Return the modules of a base: the fused paths and those of their members."""
    table = {}
    for path, sizes in SIZES.items():
        parent, _, name = path.rpartition(".")
        table[path] = ModuleShape(in_features=width, out_features=sum(sizes))
        for member, size in zip(PACKED[name], sizes, strict=True):
            table[f"{parent}.{member}"] = ModuleShape(in_features=width, out_features=size)
    return table


@pytest.mark.parametrize("path", SIZES)
def test_c25_a_fused_adapter_reaches_the_members_of_a_split_base_exactly(
    tmp_path: Path, path: str
) -> None:
    sizes, (parent, _, name) = SIZES[path], path.rpartition(".")
    folder = write_adapter(tmp_path, {path: (32, sum(sizes))}, r=4)
    bound = bind_adapter(load_adapter(folder), shapes(32), max_rank=8)

    parts = unpack_parts(pack_parts(bound, PACKED, slice_sizes=SIZES), PACKED)

    weight, x = random(sum(sizes), 32), random(5, 32, seed=3)
    whole = output(bound[path], x @ weight.T, x)
    found = [
        output(parts[f"{parent}.{member}"], x @ rows.T, x)
        for member, rows in zip(PACKED[name], torch.split(weight, list(sizes)), strict=True)
    ]
    assert list(parts) == [f"{parent}.{member}" for member in PACKED[name]]
    assert torch.allclose(torch.cat(found, dim=1), whole, atol=1e-12)


@pytest.mark.parametrize("path", SIZES)
def test_c25_split_adapters_land_on_their_own_rows_of_a_fused_base(
    tmp_path: Path, path: str
) -> None:
    sizes, (parent, _, name) = SIZES[path], path.rpartition(".")
    modules = {
        f"{parent}.{member}": (32, size) for member, size in zip(PACKED[name], sizes, strict=True)
    }
    folder = write_adapter(tmp_path, modules, r=4, rank_pattern={PACKED[name][-1]: 2})
    bound = bind_adapter(load_adapter(folder), shapes(32), max_rank=8)

    packed = pack_parts(bound, PACKED, slice_sizes=SIZES)[path]

    weight, x = random(sum(sizes), 32), random(5, 32, seed=3)
    merged = []
    for rows, member in zip(torch.split(weight, list(sizes)), modules, strict=True):
        pair = bound[member].pair
        assert pair is not None
        merged.append(rows + pair.lora_b.double() @ pair.lora_a.double())
    y = torch.split(x @ weight.T, list(sizes), dim=1)
    found = [output(piece, rows, x) for piece, rows in zip(packed.parts, y, strict=True)]
    assert torch.allclose(torch.cat(found, dim=1), x @ torch.cat(merged).T, atol=1e-12)
    assert [pair.rank for pair in packed.slices if pair] == [4] * (len(sizes) - 1) + [2]


def test_c25_members_that_fit_no_slice_are_named_with_found_and_expected() -> None:
    parts = {"l.attn.q_proj": part(16), "l.attn.v_proj": part(64), "l.attn.k_proj": part(16)}

    with pytest.raises(InvalidAdapterError) as caught:
        pack_parts(parts, PACKED, slice_sizes=SIZES)

    assert [str(problem) for problem in caught.value.problems] == [
        "l.attn.qkv_proj[q_proj] is 16 rows wide, expected 64, the rows of its slice",
        "l.attn.qkv_proj[v_proj] is 64 rows wide, expected 16, the rows of its slice",
    ]


def test_c25_fused_rows_that_fit_no_slices_are_named_with_found_and_expected() -> None:
    with pytest.raises(InvalidAdapterError, match=r"95 rows wide, expected 96 \(64 \+ 16 \+ 16"):
        pack_parts({"l.attn.qkv_proj": part(95)}, PACKED, slice_sizes=SIZES)


@pytest.mark.parametrize(
    ("members", "present"),
    [
        (("q_proj", "k_proj", "v_proj"), [True, True, True]),
        (("q_proj",), [True, False, False]),
        (("q_proj", "k_proj"), [True, True, False]),
        (("v_proj",), [False, False, True]),
    ],
)
def test_c26_a_missing_member_leaves_its_slice_as_the_base_has_it(
    members: Sequence[str], present: Sequence[bool]
) -> None:
    rows = dict(zip(PACKED["qkv_proj"], SIZES["l.attn.qkv_proj"], strict=True))
    parts = {f"l.attn.{name}": part(rows[name]) for name in members}

    packed = pack_parts(parts, PACKED, slice_sizes=SIZES)["l.attn.qkv_proj"]

    assert [pair is not None for pair in packed.slices] == present
    assert unpack_parts({"l.attn.qkv_proj": packed}, PACKED) == parts


def test_c26_a_gate_without_up_leaves_the_up_slice_absent() -> None:
    packed = pack_parts({"l.mlp.gate_proj": part(96)}, PACKED, slice_sizes=SIZES)

    assert [pair is not None for pair in packed["l.mlp.gate_up_proj"].slices] == [True, False]


def whole_parts() -> Mapping[str, BoundPart]:
    pair = part(96, width=32)
    gain, bias = random(96, seed=5).float(), random(96, seed=6).float()
    return {
        "pair": pair,
        "dora": replace(pair, gain=gain, bias=bias),
        "gain": BoundPart(gain=gain),
        "bias": BoundPart(bias=bias),
        "full": BoundPart(full=FullModule(weight=random(96, 32, seed=7), bias=bias)),
        "full without bias": BoundPart(full=FullModule(weight=random(96, 32, seed=7))),
    }


@pytest.mark.parametrize("kind", list(whole_parts()))
def test_every_kind_of_part_is_cut_by_rows(kind: str) -> None:
    whole = whole_parts()[kind]
    x, y = random(5, 32, seed=8), random(5, 96, seed=9)

    packed = pack_parts({"l.attn.qkv_proj": whole}, PACKED, slice_sizes=SIZES)

    pieces = packed["l.attn.qkv_proj"].parts
    columns = torch.split(y, [64, 16, 16], dim=1)
    found = [output(piece, rows, x) for piece, rows in zip(pieces, columns, strict=True)]
    assert torch.allclose(torch.cat(found, dim=1), output(whole, y, x), atol=1e-12)


def test_slices_of_one_pair_share_its_a() -> None:
    whole = whole_parts()["dora"]

    packed = pack_parts({"l.attn.qkv_proj": whole}, PACKED, slice_sizes=SIZES)["l.attn.qkv_proj"]

    assert whole.pair is not None
    assert all(pair is not None and pair.lora_a is whole.pair.lora_a for pair in packed.slices)
    assert packed.nbytes == whole.nbytes


def test_a_part_whose_own_rows_disagree_is_named() -> None:
    broken = replace(part(96), gain=torch.ones(95))

    with pytest.raises(InvalidAdapterError, match="rows of one part differ: lora_B 96, gain 95"):
        pack_parts({"l.attn.qkv_proj": broken}, PACKED, slice_sizes=SIZES)


def test_an_empty_part_cannot_be_cut() -> None:
    with pytest.raises(InvalidAdapterError, match="an empty part"):
        pack_parts({"l.attn.qkv_proj": BoundPart()}, PACKED, slice_sizes=SIZES)


def test_unpacking_names_modules_with_another_number_of_slices() -> None:
    packed = pack_parts({"a.qkv_proj": part(96), "lm_head": part(5)}, PACKED)

    with pytest.raises(InvalidAdapterError, match=r"a\.qkv_proj is 1 slices, expected 3, one a"):
        unpack_parts(packed, PACKED)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    present=st.lists(st.booleans(), min_size=5, max_size=5),
    parent=st.sampled_from(["", "l.0."]),
    seed=st.integers(0, 99),
)
def test_unpacking_is_the_inverse_of_packing(
    sizes: Sequence[int], present: Sequence[bool], parent: str, seed: int
) -> None:
    names = tuple("abcde"[: len(sizes)])
    parts = {
        f"{parent}{name}": part(size, seed=seed)
        for name, size, there in zip(names, sizes, present, strict=False)
        if there
    }
    parts["lm_head"] = part(3)

    packed = pack_parts(parts, {"f": names}, slice_sizes={f"{parent}f": sizes})

    assert unpack_parts(packed, {"f": names}) == parts


@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    rank=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_cutting_and_joining_rows_are_inverse(sizes: Sequence[int], rank: int, seed: int) -> None:
    whole = part(sum(sizes), rank=rank, seed=seed)
    names = tuple("abcde"[: len(sizes)])

    packed = pack_parts({"f": whole}, {"f": names}, slice_sizes={"f": sizes})

    assert whole.pair is not None
    pairs = [pair for pair in packed["f"].slices if pair is not None]
    assert torch.equal(torch.cat([pair.lora_b for pair in pairs]), whole.pair.lora_b)
    assert all(pair.lora_a is whole.pair.lora_a for pair in pairs)
