"""Module paths of a checkpoint and of a base: what is the same module, and what is not."""

from __future__ import annotations

import pytest

from lora_weights.errors import ProblemCode
from lora_weights.paths import ModulePaths, check_dropped_prefixes, resolve_paths

TEXT = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("path", "base"),
    [
        (TEXT, f"language_model.{TEXT}"),
        (TEXT, "model.language_model.layers.0.self_attn.q_proj"),
        ("model.language_model.layers.0.self_attn.q_proj", TEXT),
        (f"language_model.{TEXT}", TEXT),
        (f"model.{TEXT}", TEXT),
        (f"module.{TEXT}", TEXT),
        (f"base_model.model.{TEXT}", TEXT),
        ("layers.0.self_attn.q_proj", TEXT),
        (
            "model.language_model.layers.0.self_attn.q_proj",
            "language_model.model.layers.0.self_attn.q_proj",
        ),
        ("lm_head", "language_model.lm_head"),
        ("bert.encoder.layer.0.query", "encoder.layer.0.query"),
        ("visual.blocks.0.qkv", "model.visual.blocks.0.qkv"),
    ],
)
def test_c02_c03_spellings_of_one_module_find_it(path: str, base: str) -> None:
    assert ModulePaths([base, "other.q_proj"]).find(path) == [base]


@pytest.mark.parametrize(
    "path",
    [
        "model.vision_tower.layers.0.self_attn.q_proj",
        "vision_tower.model.layers.0.self_attn.q_proj",
        "visual.layers.0.self_attn.q_proj",
        "model.encoder.layers.0.self_attn.q_proj",
        "audio_encoder.layers.0.self_attn.q_proj",
        "mtp.layers.0.self_attn.q_proj",
    ],
)
def test_c03_a_module_of_another_tower_is_never_taken_for_one_of_the_text_model(path: str) -> None:
    assert ModulePaths([TEXT, "layers.0.self_attn.q_proj"]).find(path) == []


def test_a_text_only_name_means_the_text_model_beside_a_vision_tower() -> None:
    text = "model.language_model.layers.0.self_attn.q_proj"
    vision = "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"

    assert ModulePaths([text, vision]).find(TEXT) == [text]
    assert ModulePaths([text, vision]).find("layers.0.self_attn.q_proj") == [text, vision]


def test_c24_names_of_the_backbone_class_find_the_modules_of_the_language_model() -> None:
    targets, problems = resolve_paths(["layers.0.self_attn.q_proj"], ModulePaths([TEXT]))

    assert (targets, problems) == ({"layers.0.self_attn.q_proj": TEXT}, [])


def test_one_prefix_may_be_left_out_and_two_may_not() -> None:
    one = {"a.layers.0.q": "layers.0.q", "a.layers.1.q": "layers.1.q"}
    two = {**one, "b.layers.1.k": "layers.1.k"}

    assert check_dropped_prefixes(one) == []
    assert {p.code for p in check_dropped_prefixes(two)} == {ProblemCode.AMBIGUOUS_MODULE}
