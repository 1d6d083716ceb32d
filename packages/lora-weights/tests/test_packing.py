"""Packed modules: members in order, absent ones None, fused tensors cut by rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_weights import BoundPart, InvalidAdapterError, LoraPair, pack_parts
from lora_weights.testing import pair_of

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def part(rows: int, *, rank: int = 2, width: int = 8, seed: int = 0) -> BoundPart:
    generator = torch.Generator().manual_seed(seed)
    pair = LoraPair(
        lora_a=torch.randn((rank, width), generator=generator),
        lora_b=torch.randn((rows, rank), generator=generator),
    )
    return BoundPart(pair=pair)


def test_members_become_slices_in_the_order_of_the_mapping() -> None:
    parts = {f"l.0.{name}": part(4, rank=rank) for rank, name in enumerate("vkq", start=1)}

    packed = pack_parts(parts, {"qkv": ("q", "k", "v")})

    assert list(packed) == ["l.0.qkv"]
    assert packed["l.0.qkv"].parts == (parts["l.0.q"], parts["l.0.k"], parts["l.0.v"])
    assert [pair.rank for pair in packed["l.0.qkv"].slices if pair] == [3, 2, 1]
    assert packed["l.0.qkv"].rank == 3


def test_absent_members_are_none_and_layers_stay_apart() -> None:
    parts = {
        "layers.1.attn.q_proj": part(4),
        "layers.2.attn.q_proj": part(4),
        "layers.2.attn.k_proj": part(2),
        "layers.3.attn.v_proj": part(2),
        "layers.3.mlp.up_proj": part(4),
    }

    packed = pack_parts(parts, PACKED)

    present = {path: [pair is not None for pair in found.slices] for path, found in packed.items()}
    assert present == {
        "layers.1.attn.qkv_proj": [True, False, False],
        "layers.2.attn.qkv_proj": [True, True, False],
        "layers.3.attn.qkv_proj": [False, False, True],
        "layers.3.mlp.gate_up_proj": [False, True],
    }


def test_other_modules_keep_their_path_and_have_one_slice() -> None:
    parts = {"layers.0.attn.o_proj": part(4), "lm_head": part(9)}

    packed = pack_parts(parts, PACKED)

    assert {path: found.parts for path, found in packed.items()} == {
        path: (found,) for path, found in parts.items()
    }


def test_members_at_the_root_pack_at_the_root() -> None:
    assert list(pack_parts({"q_proj": part(4)}, PACKED)) == ["qkv_proj"]


def test_member_names_may_have_dots() -> None:
    packed = pack_parts({"layers.0.attn.q": part(4), "layers.0.mlp.q": part(4)}, {"f": ("attn.q",)})

    assert list(packed) == ["layers.0.f", "layers.0.mlp.q"]


def test_nothing_to_pack_packs_nothing() -> None:
    assert pack_parts({}, PACKED) == {}


def test_a_fused_part_stays_whole_without_sizes() -> None:
    fused = part(8)

    assert pack_parts({"qkv_proj": fused}, PACKED)["qkv_proj"].parts == (fused,)


def test_a_fused_part_is_cut_by_rows_and_shares_a() -> None:
    fused = part(8)

    packed = pack_parts({"l.qkv_proj": fused}, PACKED, slice_sizes={"l.qkv_proj": (4, 2, 2)})

    slices = [pair for pair in packed["l.qkv_proj"].slices if pair is not None]
    whole = pair_of({"x": fused}, "x")
    assert all(pair.lora_a is whole.lora_a for pair in slices)
    assert torch.equal(torch.cat([pair.lora_b for pair in slices]), whole.lora_b)
    assert [pair.out_features for pair in slices] == [4, 2, 2]
    assert packed["l.qkv_proj"].nbytes == fused.nbytes


def test_rows_that_match_no_slices_are_an_error_with_the_numbers() -> None:
    with pytest.raises(InvalidAdapterError, match=r"9 rows wide, expected 8 \(4 \+ 2 \+ 2"):
        pack_parts({"qkv_proj": part(9)}, PACKED, slice_sizes={"qkv_proj": (4, 2, 2)})


def test_a_fused_part_beside_one_of_its_members_is_an_error() -> None:
    with pytest.raises(InvalidAdapterError, match="as a whole and by its member k_proj"):
        pack_parts({"qkv_proj": part(8), "k_proj": part(2)}, PACKED)


def test_all_faulty_modules_are_in_one_error() -> None:
    parts = {"a.qkv_proj": part(9), "b.qkv_proj": part(7), "c.qkv_proj": part(8)}
    sizes = dict.fromkeys(parts, (4, 2, 2))

    with pytest.raises(InvalidAdapterError) as caught:
        pack_parts(parts, PACKED, slice_sizes=sizes)

    assert [problem.module for problem in caught.value.problems] == ["a.qkv_proj", "b.qkv_proj"]


HYBRID = {"in_proj": ("in_proj_qkv", "in_proj_z")}


@pytest.mark.parametrize(
    ("names", "present"),
    [
        (("in_proj_qkv", "in_proj_z"), [True, True, True, True]),
        (("in_proj_qkv",), [True, True, True, False]),
        (("in_proj_z",), [False, False, False, True]),
    ],
)
def test_one_member_may_cover_several_slices(names: tuple[str, ...], present: list[bool]) -> None:
    rows = {"in_proj_qkv": 8, "in_proj_z": 6}
    parts = {f"l.{name}": part(rows[name]) for name in names}

    packed = pack_parts(parts, HYBRID, slice_sizes={"l.in_proj": (4, 2, 2, 6)})

    assert [pair is not None for pair in packed["l.in_proj"].slices] == present


@pytest.mark.parametrize(
    ("parts", "sizes", "how"),
    [
        ({"in_proj_qkv": 7}, (4, 2, 2, 6), "no way"),
        ({"in_proj_qkv": 8, "in_proj_z": 5}, (4, 2, 2, 6), "no way"),
        ({}, (4, 2, 2, 6), None),
    ],
)
def test_a_division_must_be_clear(
    parts: dict[str, int], sizes: Sequence[int], how: str | None
) -> None:
    table = {f"l.{name}": part(rows) for name, rows in parts.items()}

    if how is None:
        assert pack_parts(table, HYBRID, slice_sizes={"l.in_proj": sizes}) == {}
    else:
        with pytest.raises(InvalidAdapterError, match=how):
            pack_parts(table, HYBRID, slice_sizes={"l.in_proj": sizes})


def test_two_possible_divisions_are_an_error() -> None:
    packed = {"f": ("a", "b", "c")}

    with pytest.raises(InvalidAdapterError, match="more than one way"):
        pack_parts({"b": part(2)}, packed, slice_sizes={"f": (2, 2, 2, 2)})


def test_one_member_cannot_belong_to_two_packed_modules() -> None:
    with pytest.raises(ValueError, match="'q' is a member of both"):
        pack_parts({}, {"a": ("q",), "b": ("q",)})


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    rank=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_slices_of_a_fused_part_give_the_product_of_the_whole(
    sizes: Sequence[int], rank: int, seed: int
) -> None:
    fused = part(sum(sizes), rank=rank, seed=seed)
    x = torch.randn((3, 8), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    packed = pack_parts({"f": fused}, {"f": ("a",)}, slice_sizes={"f": sizes})

    def delta(pair: LoraPair | None) -> torch.Tensor:
        assert pair is not None
        return x @ pair.lora_a.double().T @ pair.lora_b.double().T

    found = torch.cat([delta(pair) for pair in packed["f"].slices], dim=1)
    assert torch.allclose(found, delta(fused.pair))
