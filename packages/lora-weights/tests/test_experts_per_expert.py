"""Single experts' pairs (2D) on a fused experts module: stacked, padded, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from lora_weights import (
    Adapter,
    AdapterConfig,
    BoundPart,
    ExpertPair,
    ExpertPart,
    ExpertShape,
    FullModule,
    InvalidAdapterError,
    LoraPair,
    ModulePart,
    ModuleShape,
    bind_adapter,
)
from lora_weights.experts.stored import PARAMETERS, StoredExperts, StoredPair
from lora_weights.scaling import ModuleScaling

if TYPE_CHECKING:
    from collections.abc import Mapping

E = "model.layers.0.mlp.experts"
SHAPE = ExpertShape(num_experts=4, hidden_size=16, intermediate_size=12)
SHAPES: Mapping[str, ModuleShape | ExpertShape] = {
    E: SHAPE,
    "model.layers.0.self_attn.q_proj": ModuleShape(in_features=16, out_features=16),
    "model.layers.0.mlp.shared_expert.up_proj": ModuleShape(in_features=16, out_features=12),
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def part(wide: int, high: int, *, rank: int = 2, seed: int = 0) -> ModulePart:
    pair = LoraPair(lora_a=random(rank, wide, seed=seed), lora_b=random(high, rank, seed=seed + 1))
    return ModulePart(pair=pair)


def adapter(parts: Mapping[str, ModulePart]) -> Adapter:
    config = AdapterConfig(r=2, lora_alpha=2.0)
    return Adapter(config=config, parts=parts, digest="0" * 64, source="memory")


def bind(
    parts: Mapping[str, ModulePart],
    shapes: Mapping[str, ModuleShape | ExpertShape] | None = None,
    *,
    max_rank: int = 8,
) -> dict[str, BoundPart]:
    return bind_adapter(adapter(parts), shapes or SHAPES, max_rank=max_rank)


def experts_of(bound: Mapping[str, BoundPart], path: str = E) -> ExpertPart:
    found = bound[path].experts
    assert found is not None
    return found


def delta(pair: ExpertPair | None, expert: int) -> torch.Tensor:
    assert pair is not None
    return pair.lora_b[expert].double() @ pair.lora_a[expert].double()


def plain(part: ModulePart) -> torch.Tensor:
    assert part.pair is not None
    return part.pair.lora_b.double() @ part.pair.lora_a.double()


NAMES = {"hugging": ("gate_proj", "down_proj", "up_proj"), "mixtral": ("w1", "w2", "w3")}


@pytest.mark.parametrize("style", NAMES)
def test_pairs_of_single_experts_are_stacked_in_their_order(style: str) -> None:
    sizes = dict(zip(NAMES[style], ((16, 12), (12, 16), (16, 12)), strict=True))
    parts = {
        f"{E}.{expert}.{name}": part(*size, seed=10 * expert + index)
        for expert in (2, 0, 3, 1)
        for index, (name, size) in enumerate(sizes.items())
    }

    found = experts_of(bind(parts))

    for expert in range(4):
        for name, pair in zip(NAMES[style], (found.w1, found.w2, found.w3), strict=True):
            wanted = plain(parts[f"{E}.{expert}.{name}"])
            assert torch.allclose(delta(pair, expert), wanted, atol=1e-6)


def test_unequal_ranks_are_padded_and_absent_experts_are_zero() -> None:
    parts = {
        f"{E}.0.gate_proj": part(16, 12, rank=1),
        f"{E}.2.gate_proj": part(16, 12, rank=5, seed=7),
        f"{E}.3.down_proj": part(12, 16, seed=9),
    }

    found = experts_of(bind(parts))

    assert found.w3 is None
    assert found.w1 is not None
    assert found.w1.lora_a.shape == (4, 5, 16)
    assert torch.allclose(delta(found.w1, 0), plain(parts[f"{E}.0.gate_proj"]), atol=1e-6)
    assert torch.allclose(delta(found.w1, 2), plain(parts[f"{E}.2.gate_proj"]), atol=1e-6)
    assert not delta(found.w1, 1).any()
    assert torch.allclose(delta(found.w2, 3), plain(parts[f"{E}.3.down_proj"]), atol=1e-6)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_fused_pairs_of_single_experts_are_split(is_interleaved: bool) -> None:
    fused = part(16, 24)

    found = experts_of(
        bind({f"{E}.1.gate_up_proj": fused}, {E: replace(SHAPE, is_interleaved=is_interleaved)})
    )

    rows = plain(fused)
    gate, up = (rows[0::2], rows[1::2]) if is_interleaved else (rows[:12], rows[12:])
    assert torch.allclose(delta(found.w1, 1), gate, atol=1e-6)
    assert torch.allclose(delta(found.w3, 1), up, atol=1e-6)


def test_experts_without_a_gate_have_up_as_w1() -> None:
    parts = {f"{E}.0.up_proj": part(16, 12), f"{E}.0.down_proj": part(12, 16)}

    found = experts_of(bind(parts, {E: replace(SHAPE, is_gated=False)}))

    assert found.w3 is None
    assert torch.allclose(delta(found.w1, 0), plain(parts[f"{E}.0.up_proj"]), atol=1e-6)
    assert torch.allclose(delta(found.w2, 0), plain(parts[f"{E}.0.down_proj"]), atol=1e-6)


def test_attention_and_shared_experts_stay_modules_of_their_own() -> None:
    q, shared = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.shared_expert.up_proj"
    parts = {q: part(16, 16), shared: part(16, 12), f"{E}.0.up_proj": part(16, 12)}

    bound = bind(parts)

    assert set(bound) == {q, shared, E}
    assert bound[q].pair is parts[q].pair
    assert bound[shared].pair is parts[shared].pair


def test_single_experts_that_the_base_has_as_modules_are_bound_to_them() -> None:
    path = f"{E}.1.up_proj"
    shapes = {path: ModuleShape(in_features=16, out_features=12)}

    bound = bind({path: part(16, 12)}, shapes)

    assert list(bound) == [path]
    assert bound[path].pair is not None


def test_names_are_resolved_by_their_tail_like_those_of_any_module() -> None:
    shapes = {"model.language_model.layers.0.mlp.experts": SHAPE}

    bound = bind({f"{E}.1.up_proj": part(16, 12)}, shapes)

    assert list(bound) == ["model.language_model.layers.0.mlp.experts"]


def test_c12_a_layer_index_is_never_taken_from_an_expert() -> None:
    shapes = {f"layers.{layer}.experts": SHAPE for layer in (0, 1)}
    parts = {"layers.1.experts.0.up_proj": part(16, 12)}

    bound = bind(parts, shapes)

    assert list(bound) == ["layers.1.experts"]
    assert torch.allclose(
        delta(experts_of(bound, "layers.1.experts").w3, 0),
        plain(parts["layers.1.experts.0.up_proj"]),
        atol=1e-6,
    )


BIAS = torch.ones(12)


@pytest.mark.parametrize(
    ("extra", "tensor"),
    [
        ({"magnitude": BIAS}, "lora_magnitude_vector"),
        ({"lora_bias": BIAS}, "lora_B.bias"),
        ({"bias": BIAS}, "bias"),
        ({"gain": BIAS}, "gain"),
        ({"full": FullModule(weight=torch.ones(12, 16))}, "weight"),
    ],
)
def test_dora_biases_and_whole_weights_on_fused_experts_are_refused_by_name(
    extra: Mapping[str, torch.Tensor], tensor: str
) -> None:
    broken = replace(part(16, 12), **extra)  # type: ignore[arg-type]

    with pytest.raises(InvalidAdapterError) as caught:
        bind({f"{E}.1.up_proj": broken})

    assert [str(problem) for problem in caught.value.problems] == [
        (
            f"{E}.1.up_proj {tensor} is stored for one expert, "
            "expected only a low-rank pair on fused experts"
        )
    ]


def test_everything_that_does_not_fit_is_in_one_error() -> None:
    embedding = LoraPair(lora_a=torch.zeros(2, 16), lora_b=torch.zeros(12, 2), is_embedding=True)
    parts = {
        f"{E}.4.up_proj": part(16, 12),
        f"{E}.0.up_proj": part(17, 12),
        f"{E}.1.down_proj": part(12, 15),
        f"{E}.2.up_proj": part(16, 12, rank=9),
        f"{E}.3.up_proj": ModulePart(pair=embedding),
        f"{E}.3.gate_up_proj": part(16, 23),
    }

    with pytest.raises(InvalidAdapterError) as caught:
        bind(parts)

    assert [str(problem) for problem in caught.value.problems] == [
        f"{E}.4.up_proj is of expert 4, expected 0 to 3, the base's experts",
        f"{E}.0.up_proj lora_A is [2, 17], expected [2, 16]",
        f"{E}.1.down_proj lora_B is [15, 2], expected [16, 2]",
        f"{E}.2.up_proj lora_A is rank 9, expected at most 8",
        (
            f"{E}.3.up_proj lora_embedding_A is the pair of an embedding, "
            "expected one for a linear module"
        ),
        f"{E}.3.gate_up_proj lora_B is [23, 2], expected [24, 2]",
    ]


def test_a_gate_for_experts_without_one_is_refused() -> None:
    with pytest.raises(InvalidAdapterError, match="for experts with a gate, expected a base that"):
        bind({f"{E}.1.gate_proj": part(16, 12)}, {E: replace(SHAPE, is_gated=False)})


def test_two_pairs_for_one_projection_of_an_expert_are_refused() -> None:
    parts = {f"{E}.1.up_proj": part(16, 12), f"{E}.1.w3": part(16, 12)}

    with pytest.raises(InvalidAdapterError, match="a second pair for w3 of expert 1"):
        bind(parts)


def stored() -> StoredExperts:
    pair = StoredPair(
        lora_a=random(8, 12),
        lora_b=random(16, 8),
        scalings=dict.fromkeys(PARAMETERS, ModuleScaling(rank=2, scaling=1.0)),
    )
    return StoredExperts(pairs={"": pair})


def test_a_stacked_pair_is_bound_to_the_experts_module() -> None:
    found = experts_of(bind({E: ModulePart(experts=stored())}))

    assert found.w2 is not None
    assert found.w2.lora_a.shape == (4, 2, 12)


def test_stacked_and_single_experts_in_one_module_are_refused() -> None:
    parts = {E: ModulePart(experts=stored()), f"{E}.1.up_proj": part(16, 12)}

    with pytest.raises(InvalidAdapterError, match="for single experts and for all of them"):
        bind(parts)


def test_stacked_pairs_on_a_plain_module_are_refused() -> None:
    shapes = {E: ModuleShape(in_features=12, out_features=16)}

    with pytest.raises(InvalidAdapterError, match="a stacked pair of experts, expected one for a"):
        bind({E: ModulePart(experts=stored())}, shapes)


def test_a_plain_pair_on_a_fused_experts_module_is_refused() -> None:
    with pytest.raises(InvalidAdapterError, match="expected experts"):
        bind({E: part(16, 12)})


def test_experts_that_the_base_does_not_have_are_named() -> None:
    with pytest.raises(InvalidAdapterError) as caught:
        bind({"model.layers.7.mlp.experts.0.up_proj": part(16, 12)})

    assert "model.layers.7.mlp.experts.0.up_proj is not a module" in str(caught.value)
