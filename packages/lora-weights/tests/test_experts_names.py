"""Which experts and which projection a module path names."""

from __future__ import annotations

import pytest

from lora_weights import ExpertShape
from lora_weights.experts.names import (
    ExpertName,
    Projection,
    parse_expert,
    projection_sizes,
    projections_of,
)

E = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (f"{E}.3.gate_proj", ExpertName(experts=E, expert=3, name="gate_proj")),
        (f"{E}.12.w2", ExpertName(experts=E, expert=12, name="w2")),
        (E, ExpertName(experts=E)),
        (f"{E}.base_layer", ExpertName(experts=E, name="base_layer")),
        (f"{E}.base_layer.base_layer", ExpertName(experts=E, name="base_layer.base_layer")),
        (f"{E}.w1", ExpertName(experts=E, name="w1")),
        (f"{E}.gate_up_proj", ExpertName(experts=E, name="gate_up_proj")),
        ("experts.0.w1", ExpertName(experts="experts", expert=0, name="w1")),
    ],
)
def test_paths_of_routed_experts_are_taken_apart(path: str, name: ExpertName) -> None:
    assert parse_expert(path) == name


@pytest.mark.parametrize(
    "path",
    [
        "model.layers.1.mlp.shared_expert.gate_proj",
        "model.layers.1.mlp.shared_experts.up_proj",
        "model.layers.1.mlp.gate",
        f"{E}.3",
        f"{E}.3.q_proj",
        f"{E}.-1.w1",
        f"{E}.gate",
        f"{E}.3.mlp.w1",
        f"{E}.3.gate_proj.base_layer",
    ],
)
def test_other_paths_are_no_experts(path: str) -> None:
    assert parse_expert(path) is None


def test_c12_an_index_after_experts_is_an_expert_and_one_before_is_a_layer() -> None:
    first = parse_expert("layers.1.experts.0.up_proj")
    second = parse_expert("layers.0.experts.1.up_proj")

    assert first == ExpertName(experts="layers.1.experts", expert=0, name="up_proj")
    assert second == ExpertName(experts="layers.0.experts", expert=1, name="up_proj")


def test_experts_without_a_gate_have_one_projection_before_the_activation() -> None:
    gated = ExpertShape(num_experts=2, hidden_size=3, intermediate_size=4)
    plain = ExpertShape(num_experts=2, hidden_size=3, intermediate_size=4, is_gated=False)

    assert projections_of(gated)["up_proj"] is Projection.W3
    assert projections_of(plain)["up_proj"] is Projection.W1
    assert "gate_proj" not in projections_of(plain)
    assert projection_sizes(plain) == {Projection.W1: (3, 4), Projection.W2: (4, 3)}
    assert projection_sizes(gated)[Projection.W13] == (3, 8)
