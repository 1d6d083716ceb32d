"""Stacked pairs: PEFT's 3D parameters in every order and direction, named projections, refusals.

Each expert's update is compared with PEFT's own formula for the same tensors, in float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_weights import ExpertPair, ExpertPart, ExpertShape, ProblemCode
from lora_weights.experts.stacked import build_stacked
from lora_weights.experts.stored import PARAMETERS, StoredExperts, StoredPair
from lora_weights.scaling import ModuleScaling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lora_weights import Problem

PATH = "model.layers.0.mlp.experts"
SHAPE = ExpertShape(num_experts=4, hidden_size=16, intermediate_size=12)
SIZES = {"gate_up_proj": (16, 24), "down_proj": (12, 16), "up_proj": (16, 12)}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameter(
    name: str, *, rank: int = 2, scaling: float = 2.0, is_reversed: bool = False, experts: int = 4
) -> StoredPair:
    """Return a pair on a 3D parameter; `is_reversed`: A over the outputs, as PEFT 0.18 has it."""
    wide, high = SIZES[name][::-1] if is_reversed else SIZES[name]
    seed = sum(map(ord, name))
    return StoredPair(
        lora_a=random(experts * rank, wide, seed=seed),
        lora_b=random(high, rank * experts, seed=seed + 1),
        scalings=dict.fromkeys(PARAMETERS, ModuleScaling(rank=rank, scaling=scaling)),
    )


def peft_delta(pair: StoredPair, scaling: float, *, is_reversed: bool = False) -> torch.Tensor:
    """Return `[X, O, I]` as ParamWrapper.get_delta_weight computes it, in float64."""
    experts = SHAPE.num_experts
    a = pair.lora_a.double().reshape(experts, -1, pair.lora_a.shape[1])
    b = pair.lora_b.double().reshape(pair.lora_b.shape[0], -1, experts)
    if is_reversed:
        # Without the exchange of in and out, the delta has the parameter's own `[X, d1, d2]`.
        return torch.einsum("o r e, e r i -> e i o", b, a) * scaling
    return torch.einsum("o r e, e r i -> e o i", b, a) * scaling


def delta(pair: ExpertPair | None) -> torch.Tensor:
    assert pair is not None
    return pair.lora_b.double() @ pair.lora_a.double()


def build(
    pairs: Mapping[str, StoredPair],
    shape: ExpertShape = SHAPE,
    *,
    version: str | None = None,
    parameters: Sequence[str] = (),
    max_rank: int = 8,
    local: range | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[ExpertPart | None, list[Problem]]:
    stored = StoredExperts(
        pairs=pairs, dtype=dtype, peft_version=version, parameters=tuple(parameters)
    )
    return build_stacked(PATH, stored, shape, max_rank=max_rank, local=local)


def built(*args: object, **kwargs: object) -> ExpertPart:
    part, problems = build(*args, **kwargs)  # type: ignore[arg-type]
    assert problems == []
    assert part is not None
    return part


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("order", [("gate_up_proj", "down_proj"), ("down_proj", "gate_up_proj")])
def test_c27_c28_c30_3d_pairs_are_told_apart_by_shape_in_every_order_and_direction(
    order: Sequence[str], is_interleaved: bool, is_reversed: bool
) -> None:
    pairs = {
        nesting: parameter(name, is_reversed=is_reversed)
        for nesting, name in zip(("base_layer", ""), order, strict=True)
    }
    nested = dict(zip(order, pairs.values(), strict=True))

    part = built(pairs, replace(SHAPE, is_interleaved=is_interleaved))

    fused = peft_delta(nested["gate_up_proj"], 2.0, is_reversed=is_reversed)
    gate, up = (
        (fused[:, 0::2], fused[:, 1::2]) if is_interleaved else (fused[:, :12], fused[:, 12:])
    )
    assert close(delta(part.w1), gate)
    assert close(delta(part.w3), up)
    assert close(delta(part.w2), peft_delta(nested["down_proj"], 2.0, is_reversed=is_reversed))
    assert part.has_shared_a


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_one_pair_of_two_leaves_the_other_absent(name: str) -> None:
    part = built({"": parameter(name)})

    assert (part.w2 is None) is (name == "gate_up_proj")
    assert (part.w1 is None) is (part.w3 is None) is (name == "down_proj")


SQUARE = replace(SHAPE, hidden_size=24)


def square(version: str | None) -> tuple[ExpertPart | None, list[Problem]]:
    pair = parameter("gate_up_proj")
    pair = replace(pair, lora_a=random(8, 24, seed=3))
    return build({"": pair}, SQUARE, version=version)


@pytest.mark.parametrize(("version", "is_reversed"), [("0.18.1", True), ("0.19.1", False)])
def test_c28_a_square_pair_is_read_as_the_release_wrote_it(version: str, is_reversed: bool) -> None:
    part, problems = square(version)

    pair = replace(parameter("gate_up_proj"), lora_a=random(8, 24, seed=3))
    wanted = peft_delta(pair, 2.0, is_reversed=is_reversed)
    assert problems == []
    assert part is not None
    assert close(torch.cat([delta(part.w1), delta(part.w3)], dim=1), wanted)


@pytest.mark.parametrize("version", [None, "0.18.2.dev0", "main"])
def test_c28_a_square_pair_of_an_unknown_release_is_refused(version: str | None) -> None:
    part, problems = square(version)

    assert part is None
    assert [problem.code for problem in problems] == [ProblemCode.AMBIGUOUS_MODULE]
    assert f"fits in 2 ways (peft_version {version or 'missing'})" in str(problems[0])


def test_c28_one_delta_written_by_two_releases_is_the_same_part() -> None:
    new = parameter("down_proj")
    experts, rank = 4, 2
    a = new.lora_a.reshape(experts, rank, -1)
    b = new.lora_b.reshape(new.lora_b.shape[0], rank, experts).permute(2, 0, 1)
    # The older release holds the transposed update: its A is our B, for every expert.
    old = replace(
        new,
        lora_a=b.transpose(1, 2).reshape(experts * rank, -1),
        lora_b=a.transpose(1, 2).permute(1, 2, 0).reshape(a.shape[2], -1),
    )

    first = built({"": new}, version="0.19.1")
    second = built({"": old}, version="0.18.1")

    assert first.w2 is not None
    assert second.w2 is not None
    assert close(delta(first.w2), delta(second.w2))


def test_c29_another_number_of_experts_is_named_with_both() -> None:
    pairs = {"base_layer": parameter("gate_up_proj", experts=3), "": parameter("down_proj")}

    part, problems = build(pairs)

    assert part is None
    assert [str(problem) for problem in problems] == [
        f"{PATH}.base_layer lora_A is 6 rows high, expected a multiple of 4, the base's experts"
    ]


def test_c29_experts_that_divide_by_chance_are_caught_by_the_rank() -> None:
    pair = parameter("down_proj", rank=4, experts=2)
    pair = replace(pair, scalings=dict.fromkeys(PARAMETERS, ModuleScaling(rank=4, scaling=1.0)))

    _, problems = build({"": pair})

    wanted = "is 8 rows high, expected 16 (4 experts of rank 4 for down_proj)"
    assert [wanted in str(problem) for problem in problems] == [True]


def test_ranks_and_alphas_by_pattern_belong_to_the_parameter_the_shapes_say() -> None:
    scalings = {
        "gate_up_proj": ModuleScaling(rank=2, scaling=0.5),
        "down_proj": ModuleScaling(rank=3, scaling=4.0),
        "up_proj": ModuleScaling(rank=8, scaling=1.0),
    }
    down = replace(parameter("down_proj", rank=3), scalings=scalings)
    fused = replace(parameter("gate_up_proj", rank=2), scalings=scalings)

    # The two parameters are wrapped in the order that PEFT does not usually have.
    part = built({"base_layer": down, "": fused})

    assert part.w1 is not None
    assert part.w2 is not None
    assert (part.w1.rank, part.w2.rank) == (2, 3)
    assert close(delta(part.w1), peft_delta(fused, 0.5)[:, :12])
    assert close(delta(part.w2), peft_delta(down, 4.0))


def test_sizes_of_another_model_are_named_with_what_would_fit() -> None:
    pair = replace(parameter("down_proj"), lora_a=random(8, 13))

    _, problems = build({"": pair})

    text = str(problems[0])
    assert "of width 13, with lora_B of 16 rows" in text
    assert "16 and 24 (gate_up_proj), 12 and 16 (down_proj), in either order" in text


def test_more_pairs_than_parameters_are_refused() -> None:
    names = ("base_layer.base_layer", "base_layer", "")
    pairs = {name: parameter("gate_up_proj") for name in names}

    _, problems = build(pairs)

    assert "wrapped 3 times, expected at most 2 pairs" in str(problems[0])


def test_a_rank_above_the_limit_is_named_with_both() -> None:
    _, problems = build({"": parameter("down_proj", rank=4)}, max_rank=3)

    assert [str(problem) for problem in problems] == [
        f"{PATH} lora_A is rank 4, expected at most 3"
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scaling_is_folded_in_float32_before_the_one_cast(dtype: torch.dtype) -> None:
    pair = parameter("down_proj", scaling=1 / 3)

    part = built({"": pair}, dtype=dtype)

    assert part.w2 is not None
    wanted = pair.lora_b.reshape(16, 2, 4).permute(2, 0, 1).mul(1 / 3).to(dtype)
    assert torch.equal(part.w2.lora_b, wanted)
    assert part.w2.lora_a.dtype == part.w2.lora_b.dtype == dtype
    assert part.w2.lora_b.is_contiguous()


def test_float64_is_held_in_float32_and_other_types_as_stored() -> None:
    pair = parameter("down_proj")
    wide = replace(pair, lora_a=pair.lora_a.double(), lora_b=pair.lora_b.half())

    part = built({"": wide})

    assert part.w2 is not None
    assert part.w2.lora_a.dtype == torch.float32
    assert part.w2.lora_b.dtype == torch.float16


def test_a_product_outside_the_range_of_its_type_is_named() -> None:
    _, problems = build({"": parameter("down_proj", scaling=1e6)}, dtype=torch.float16)

    assert [problem.code for problem in problems] == [ProblemCode.NOT_FINITE]
    assert "lora_B is outside the range of torch.float16 once it is scaled" in str(problems[0])


def test_loading_leaves_the_stored_tensors_as_they_were() -> None:
    pair = parameter("down_proj")
    before = pair.lora_a.clone(), pair.lora_b.clone()

    built({"": pair})

    assert torch.equal(pair.lora_a, before[0])
    assert torch.equal(pair.lora_b, before[1])


@pytest.mark.parametrize("local", [range(1), range(1, 3), range(2, 4)])
def test_a_block_of_experts_is_that_block_of_the_whole(local: range) -> None:
    pairs = {"base_layer": parameter("gate_up_proj"), "": parameter("down_proj")}
    whole = built(pairs)

    part = built(pairs, local=local)

    for name in ("w1", "w2", "w3"):
        cut, full = getattr(part, name), getattr(whole, name)
        assert torch.equal(cut.lora_a, full.lora_a[local.start : local.stop])
        assert torch.equal(cut.lora_b, full.lora_b[local.start : local.stop])
    assert part.nbytes == whole.nbytes * len(local) // 4


UNGATED = replace(SHAPE, is_gated=False)


def test_experts_without_a_gate_have_w1_and_w2_and_nothing_is_scaled_twice() -> None:
    pairs = {"base_layer": parameter("up_proj"), "": parameter("down_proj")}

    part = built(pairs, UNGATED, version="0.21.2")

    assert part.w3 is None
    assert close(delta(part.w1), peft_delta(pairs["base_layer"], 2.0))
    assert close(delta(part.w2), peft_delta(pairs[""], 2.0))


def stacked(
    wide: int, high: int, *, a_experts: int = 4, b_experts: int = 4, rank: int = 2, seed: int = 0
) -> StoredPair:
    return StoredPair(
        lora_a=random(a_experts, rank, wide, seed=seed),
        lora_b=random(b_experts, high, rank, seed=seed + 1),
        scalings={"any": ModuleScaling(rank=rank, scaling=2.0)},
    )


def stacked_delta(pair: StoredPair) -> torch.Tensor:
    return 2.0 * pair.lora_b.double() @ pair.lora_a.double()


@pytest.mark.parametrize("names", [("w1", "w2", "w3"), ("gate_proj", "down_proj", "up_proj")])
def test_stacked_projections_are_read_by_their_names(names: Sequence[str]) -> None:
    pairs = {
        names[0]: stacked(16, 12),
        names[1]: stacked(12, 16, seed=5),
        names[2]: stacked(16, 12, seed=9),
    }

    part = built(pairs)

    for name, found in zip(names, (part.w1, part.w2, part.w3), strict=True):
        assert close(delta(found), stacked_delta(pairs[name]))


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("name", ["gate_up_proj", "w13"])
def test_stacked_fused_projections_are_split(name: str, is_interleaved: bool) -> None:
    pair = stacked(16, 24)

    part = built({name: pair}, replace(SHAPE, is_interleaved=is_interleaved))

    whole = stacked_delta(pair)
    halves = (whole[:, 0::2], whole[:, 1::2]) if is_interleaved else (whole[:, :12], whole[:, 12:])
    assert close(delta(part.w1), halves[0])
    assert close(delta(part.w3), halves[1])
    assert part.has_shared_a


def test_shared_outer_factors_keep_their_leading_one() -> None:
    pairs = {
        "w1": stacked(16, 12, a_experts=1),
        "w2": stacked(12, 16, b_experts=1, seed=5),
        "w3": stacked(16, 12, a_experts=1, seed=9),
    }

    part = built(pairs, local=range(1, 3))

    assert part.w1 is not None
    assert part.w2 is not None
    assert part.w1.lora_a.shape[0] == part.w2.lora_b.shape[0] == 1
    assert part.w1.lora_b.shape[0] == part.w2.lora_a.shape[0] == 2
    assert close(delta(part.w1), stacked_delta(pairs["w1"])[1:3])
    assert close(delta(part.w2), stacked_delta(pairs["w2"])[1:3])


@pytest.mark.parametrize(
    ("pairs", "shape", "match"),
    [
        ({"w1": stacked(17, 12)}, SHAPE, "[4, 2, 17], expected [4 or 1, 2, 16]"),
        ({"w2": stacked(12, 16, b_experts=3)}, SHAPE, "[3, 16, 2], expected [4 or 1, 16, 2]"),
        ({"gate_proj": stacked(16, 12)}, UNGATED, "for experts with a gate"),
        ({"w1": stacked(16, 12), "": parameter("down_proj")}, SHAPE, "beside those of w1"),
        ({"w1": stacked(16, 12), "gate_proj": stacked(16, 12)}, SHAPE, "a second pair for w1"),
        ({"w1": stacked(16, 12), "w13": stacked(16, 24)}, SHAPE, "a second pair for w1"),
        ({"": stacked(16, 12)}, SHAPE, "expected [X*r, I] and [O, r*X]"),
    ],
)
def test_stacked_pairs_that_do_not_fit_are_named(
    pairs: Mapping[str, StoredPair], shape: ExpertShape, match: str
) -> None:
    part, problems = build(pairs, shape)

    assert part is None
    assert match in "\n".join(map(str, problems))


@given(
    experts=st.integers(1, 4),
    hidden=st.integers(1, 6),
    inner=st.integers(1, 6),
    rank=st.integers(1, 3),
    is_reversed=st.booleans(),
    is_transposed=st.booleans(),
    swaps=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=80)
def test_whatever_a_release_writes_is_read_back_as_the_update_it_meant(
    *,
    experts: int,
    hidden: int,
    inner: int,
    rank: int,
    is_reversed: bool,
    is_transposed: bool,
    swaps: bool,
    seed: int,
) -> None:
    shape = ExpertShape(
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size=inner,
        is_transposed=is_transposed,
    )
    # 0.18.1 gives A the outputs of a base that is not transposed; 0.19.0 of any base.
    version = "0.19.0" if is_reversed else "0.21.2"
    wanted, pairs = {}, {}
    sizes = {"gate_up_proj": (hidden, 2 * inner), "down_proj": (inner, hidden)}
    order = list(sizes)[::-1] if swaps else list(sizes)
    for nesting, name in zip(("base_layer", ""), order, strict=True):
        wide, high = sizes[name]
        a, b = random(experts, rank, wide, seed=seed), random(experts, high, rank, seed=seed + 1)
        wanted[name] = b.double() @ a.double()
        if is_reversed:
            a, b = b.transpose(1, 2), a.transpose(1, 2)
        pairs[nesting] = StoredPair(
            lora_a=a.reshape(experts * rank, -1),
            lora_b=b.permute(1, 2, 0).reshape(b.shape[1], -1),
            scalings=dict.fromkeys(PARAMETERS, ModuleScaling(rank=rank, scaling=1.0)),
        )

    part = built(pairs, shape, version=version)

    assert close(torch.cat([delta(part.w1), delta(part.w3)], dim=1), wanted["gate_up_proj"])
    assert close(delta(part.w2), wanted["down_proj"])
