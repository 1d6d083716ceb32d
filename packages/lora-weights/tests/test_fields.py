"""Every PEFT field has one class; unknown ones are refused while they are active."""

from __future__ import annotations

import pytest

from lora_weights.errors import ProblemCode
from lora_weights.fields import FIELDS, FieldClass, check_fields, is_active

# The fields that PEFT 0.21 writes for a LoRA, with its defaults.
PEFT_DEFAULTS: dict[str, object] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "base",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.1,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.0",
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}

ACTIVE = {
    "alora_invocation_tokens": [1, 2],
    "arrow_config": {"top_k": 3},
    "enable_lora": [True, False],
    "kasa_config": {"beta": 1e-4},
    "layer_replication": [[0, 4], [2, 5]],
    "megatron_config": {"size": 2},
    "monteclora_config": {"num_samples": 8},
    "use_bdlora": {"nblocks": 2},
    "use_qalora": True,
}


def test_the_fields_that_peft_writes_are_all_classed_and_pass_with_their_defaults() -> None:
    assert set(PEFT_DEFAULTS) <= set(FIELDS)
    assert check_fields(PEFT_DEFAULTS) == []


def test_every_refused_field_has_a_reason_and_an_active_value_in_this_test() -> None:
    refused = {name for name, rule in FIELDS.items() if rule.field_class is FieldClass.REFUSED}

    assert refused == set(ACTIVE)
    assert all(FIELDS[name].reason for name in refused)


@pytest.mark.parametrize("name", sorted(ACTIVE))
def test_refused_fields_are_named_while_active(name: str) -> None:
    problems = check_fields({**PEFT_DEFAULTS, name: ACTIVE[name]})

    assert [problem.code for problem in problems] == [ProblemCode.UNSUPPORTED_FIELD]
    assert name in problems[0].tensor


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_field_passes_when_null_false_or_empty(value: object) -> None:
    assert check_fields({"from_the_future": value}) == []


@pytest.mark.parametrize("value", [True, 0, 1.5, "x", [0], {"a": None}])
def test_an_unknown_field_is_refused_by_name_when_active(value: object) -> None:
    problems = check_fields({"from_the_future": value})

    assert [problem.code for problem in problems] == [ProblemCode.UNKNOWN_FIELD]
    assert "from_the_future" in problems[0].tensor


def test_a_long_value_is_cut_in_the_problem() -> None:
    problems = check_fields({"from_the_future": "x" * 10_000})

    assert len(str(problems[0])) < 300


def test_zero_is_a_value_and_emptiness_is_none() -> None:
    assert is_active(0)
    empty: tuple[object, ...] = (None, False, "", [], {})
    assert not any(is_active(value) for value in empty)
