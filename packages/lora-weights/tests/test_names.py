"""Tensor keys taken apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_weights.names import PAIR_PARTS, ParsedKey, Part, build_key, parse_key

Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "key",
    [
        f"base_model.model.{Q}.lora_A.weight",
        f"{Q}.lora_A.weight",
        f"module.base_model.model.{Q}.lora_A.weight",
        f"_orig_mod.base_model.model.{Q}.lora_A.weight",
        "base_model.model.model._orig_mod.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0._fsdp_wrapped_module.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.lora_A.weight",
    ],
)
def test_prefixes_and_wrappers_are_removed(key: str) -> None:
    assert parse_key(key) == ParsedKey(Q, Part.LORA_A)


def test_one_peft_prefix_is_removed_and_no_more() -> None:
    assert parse_key(f"base_model.model.model.{Q}.lora_A.weight").module == f"model.{Q}"


@pytest.mark.parametrize(
    ("ending", "part", "name"),
    [
        ("lora_A.weight", Part.LORA_A, None),
        ("lora_B.weight", Part.LORA_B, None),
        ("lora_A.default.weight", Part.LORA_A, "default"),
        ("lora_B.lora.weight", Part.LORA_B, "lora"),
        ("lora_B.bias", Part.LORA_BIAS, None),
        ("lora_B.default.bias", Part.LORA_BIAS, "default"),
        ("lora_embedding_A", Part.EMBEDDING_A, None),
        ("lora_embedding_B.default", Part.EMBEDDING_B, "default"),
        ("lora_magnitude_vector", Part.MAGNITUDE, None),
        ("lora_magnitude_vector.default", Part.MAGNITUDE, "default"),
        ("lora_magnitude_vector.weight", Part.MAGNITUDE, None),
        ("lora_magnitude_vector.default.weight", Part.MAGNITUDE, "default"),
        ("base_layer.weight", Part.BASE_WEIGHT, None),
        ("base_layer.bias", Part.BASE_BIAS, None),
        ("original_module.weight", Part.ORIGINAL_WEIGHT, None),
        ("original_module.bias", Part.ORIGINAL_BIAS, None),
        ("token_adapter.trainable_tokens_delta", Part.TOKEN_ROWS, None),
        ("token_adapter.trainable_tokens_delta.default", Part.TOKEN_ROWS, "default"),
        ("token_adapter.base_layer.weight", Part.BASE_WEIGHT, None),
        ("ia3_l", Part.IA3_GAIN, None),
        ("ia3_l.default", Part.IA3_GAIN, "default"),
        ("vera_lambda_b", Part.VERA_B, None),
        ("vera_lambda_d.default", Part.VERA_D, "default"),
        ("hada_w1_a", Part.HADA_W1_A, None),
        ("hada_t2", Part.HADA_T2, None),
        ("lokr_w1", Part.LOKR_W1, None),
        ("lokr_w2_b.default", Part.LOKR_W2_B, "default"),
        ("lora_velora_embed", Part.TRAINING_STATE, None),
        ("modules_to_save.bias", Part.FULL_BIAS, None),
        ("weight", Part.FULL_WEIGHT, None),
        ("bias", Part.FULL_BIAS, None),
        ("modules_to_save.default.weight", Part.FULL_WEIGHT, "default"),
    ],
)
def test_endings_name_the_part(ending: str, part: Part, name: str | None) -> None:
    assert parse_key(f"base_model.model.{Q}.{ending}") == ParsedKey(Q, part, name)


@pytest.mark.parametrize(
    "ending", ["lora_down.weight", "lora_up.weight", "alpha", "lora_a.weight", "lora.down.weight"]
)
def test_layouts_of_other_tools_are_recognised(ending: str) -> None:
    assert parse_key(f"{Q}.{ending}").part is Part.FOREIGN


@pytest.mark.parametrize(
    "key",
    [
        "prompt_embeddings",
        f"{Q}.lora_E",
        f"{Q}.lora_A",
        f"{Q}.lora_A.a.b.weight",
        f"{Q}.lora_embedding_A.weight",
        f"{Q}.ia3_l.weight",
        f"{Q}.vera_A",
        "ia3_l",
        "lora_A.weight.x",
        "weight",
        "",
    ],
)
def test_what_fits_nothing_is_unknown(key: str) -> None:
    assert parse_key(key).part is Part.UNKNOWN


def test_a_module_whose_name_starts_with_lora_is_an_ordinary_module() -> None:
    parsed = parse_key("base_model.model.model.lora_gate.q_proj.lora_A.weight")

    assert parsed == ParsedKey("model.lora_gate.q_proj", Part.LORA_A)


@pytest.mark.parametrize("key", ["base_model.vera_A", "vera_A", "base_model.vera_A.default"])
def test_a_tensor_that_all_modules_share_belongs_to_none(key: str) -> None:
    parsed = parse_key(key)

    assert (parsed.module, parsed.part) == ("", Part.VERA_SHARED_A)
    assert build_key("", Part.VERA_SHARED_A) == "base_model.vera_A"


def test_the_inner_path_of_an_untrained_copy_is_kept() -> None:
    parsed = parse_key("base_model.model.classifier.original_module.dense.weight")

    assert parsed == ParsedKey("classifier.dense", Part.ORIGINAL_WEIGHT)


def test_the_inner_path_of_a_saved_module_is_kept() -> None:
    parsed = parse_key("base_model.model.classifier.modules_to_save.default.dense.weight")

    assert parsed == ParsedKey("classifier.dense", Part.FULL_WEIGHT, "default")


@given(
    path=st.lists(st.from_regex(r"[a-z_]{1,8}[0-9]?", fullmatch=True), min_size=1, max_size=6),
    part=st.sampled_from(sorted(PAIR_PARTS)),
)
def test_a_built_key_parses_to_what_it_was_built_from(path: list[str], part: Part) -> None:
    module = ".".join(path)
    wrapped = module.startswith(("module.", "base_model.model."))

    parsed = parse_key(build_key(module, part))

    assert wrapped or parsed == ParsedKey(module, part)


@given(st.text(max_size=60))
def test_any_text_parses_to_something(key: str) -> None:
    assert parse_key(key).part in set(Part)
