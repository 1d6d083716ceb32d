"""adapter_config.json: what is read, what is refused, everything at once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from lora_weights import AdapterConfig, InvalidAdapterError, ProblemCode

if TYPE_CHECKING:
    from pathlib import Path

    from lora_weights import Problem

PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def problems_of(**fields: object) -> tuple[Problem, ...]:
    with pytest.raises(InvalidAdapterError) as caught:
        AdapterConfig.from_dict({**PLAIN, **fields})
    return caught.value.problems


def codes_of(**fields: object) -> list[ProblemCode]:
    return [problem.code for problem in problems_of(**fields)]


def test_a_handmade_configuration_gets_pefts_defaults() -> None:
    config = AdapterConfig.from_dict(PLAIN)

    assert (config.r, config.lora_alpha, config.target_modules) == (8, 16.0, ("q_proj", "v_proj"))
    assert (config.bias, config.use_rslora, config.rank_pattern) == ("none", False, {})


def test_missing_required_fields_are_named_together() -> None:
    with pytest.raises(InvalidAdapterError) as caught:
        AdapterConfig.from_dict({"peft_type": "LORA"})

    assert [problem.tensor for problem in caught.value.problems] == [
        "adapter_config.json lora_alpha",
        "adapter_config.json r",
        "adapter_config.json target_modules",
    ]


@pytest.mark.parametrize("targets", [None, "all-linear", r".*\.(q|v)_proj", [], ["a.b", "0"]])
def test_targets_may_be_null_a_pattern_or_any_list(targets: list[str] | str | None) -> None:
    config = AdapterConfig.from_dict({**PLAIN, "target_modules": targets})

    assert config.target_modules == (tuple(targets) if isinstance(targets, list) else targets)


def test_repeated_targets_are_listed_once() -> None:
    config = AdapterConfig.from_dict({**PLAIN, "target_modules": ["q_proj", "q_proj"]})

    assert config.target_modules == ("q_proj",)


@pytest.mark.parametrize("kind", ["ADALORA", "OFT", "PROMPT_TUNING", "XLORA", "lora", 3, ["LORA"]])
def test_other_methods_are_refused_by_name_and_nothing_else_is_said(kind: object) -> None:
    problems = problems_of(peft_type=kind, init_r=64, strange=True)

    assert [problem.code for problem in problems] == [ProblemCode.UNSUPPORTED_TYPE]
    assert repr(kind) in problems[0].found


def test_a_file_of_another_library_is_refused_with_the_keys_it_has() -> None:
    with pytest.raises(InvalidAdapterError) as caught:
        AdapterConfig.from_dict({"base_model": "x", "config": {}})

    assert caught.value.problems[0].code is ProblemCode.NOT_PEFT
    assert "base_model, config" in caught.value.problems[0].found


@pytest.mark.parametrize("rank", [0, -1, 8.0, "8", True, None])
def test_a_rank_is_a_positive_integer(rank: object) -> None:
    assert codes_of(r=rank) == [ProblemCode.INVALID_FIELD]


@pytest.mark.parametrize("alpha", ["16", True, None, float("nan"), float("inf"), 10**400])
def test_an_alpha_is_a_finite_number(alpha: object) -> None:
    assert codes_of(lora_alpha=alpha) == [ProblemCode.INVALID_FIELD]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"q_proj": "8"}),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"(a+)+": 8}),
        ("alpha_pattern", {"q_proj": None}),
        ("use_rslora", "yes"),
        ("bias", "some"),
        ("modules_to_save", "classifier"),
        ("target_modules", [1]),
    ],
)
def test_wrong_values_are_named(field: str, value: object) -> None:
    problems = problems_of(**{field: value})

    assert problems[0].code is ProblemCode.INVALID_FIELD
    assert field in problems[0].tensor


def test_too_many_regular_expressions_are_refused_and_many_plain_paths_are_not() -> None:
    many = {f"layers.{i}.q_proj": 4 for i in range(500)}
    expressions = {f"layers.{i}.[qk]_proj": 4 for i in range(65)}

    assert len(AdapterConfig.from_dict({**PLAIN, "rank_pattern": many}).rank_pattern) == 500
    assert codes_of(rank_pattern=expressions) == [ProblemCode.INVALID_FIELD]


def test_null_patterns_are_empty() -> None:
    config = AdapterConfig.from_dict({**PLAIN, "rank_pattern": None, "alpha_pattern": None})

    assert (config.rank_pattern, config.alpha_pattern) == ({}, {})


@pytest.mark.parametrize("value", [True, False, None, "gaussian", "eva", "orthogonal", "lora_ga"])
def test_initialisations_that_leave_the_base_alone_pass(value: object) -> None:
    assert AdapterConfig.from_dict({**PLAIN, "init_lora_weights": value}).init_lora_weights == value


@pytest.mark.parametrize("value", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "new", 1])
def test_initialisations_that_change_the_base_are_refused(value: object) -> None:
    problems = problems_of(init_lora_weights=value)

    assert [problem.code for problem in problems] == [ProblemCode.UNSUPPORTED_FIELD]
    assert repr(value) in problems[0].found


def test_every_reason_is_reported_at_once() -> None:
    problems = problems_of(r=0, alora_invocation_tokens=[1], init_lora_weights="pissa", strange=[1])

    text = "\n".join(map(str, problems))
    assert len(problems) == 4
    for name in (
        "adapter_config.json r ",
        "alora_invocation_tokens",
        "init_lora_weights",
        "strange",
    ):
        assert name in text


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "a JSON list"),
        (b"[" * 100_000, "not JSON"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a git-lfs pointer"),
    ],
)
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_bytes(content)

    with pytest.raises(InvalidAdapterError) as caught:
        AdapterConfig.from_json(path)

    assert caught.value.problems[0].code is ProblemCode.CONFIG_UNREADABLE
    assert found in caught.value.problems[0].found
    assert str(path) in str(caught.value)


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(PLAIN, indent=1).replace("\n", "\r\n").encode())

    assert AdapterConfig.from_json(path).r == 8


def test_problems_of_a_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**PLAIN, "use_qalora": True}))

    with pytest.raises(InvalidAdapterError, match=r"adapter_config\.json': "):
        AdapterConfig.from_json(path)


METHODS: dict[str, dict[str, object]] = {
    "IA3": {"target_modules": ["k_proj"], "feedforward_modules": ["down_proj"]},
    "VERA": {"target_modules": ["k_proj"], "r": 64, "save_projection": True, "bias": "vera_only"},
    "LOHA": {"target_modules": ["k_proj"], "r": 4, "alpha": 2, "rank_pattern": {"k_proj": 2}},
    "LOKR": {"target_modules": ["k_proj"], "r": 4, "alpha": 2, "decompose_factor": 4},
}


@pytest.mark.parametrize("kind", METHODS)
def test_each_method_has_fields_of_its_own(kind: str) -> None:
    config = AdapterConfig.from_dict({"peft_type": kind, **METHODS[kind]})

    assert config.peft_type == kind
    assert config.r == METHODS[kind].get("r", 0)
    assert config.lora_alpha == METHODS[kind].get("alpha", 1.0)


@pytest.mark.parametrize("kind", METHODS)
def test_an_active_field_of_another_method_is_refused(kind: str) -> None:
    with pytest.raises(InvalidAdapterError) as caught:
        AdapterConfig.from_dict({"peft_type": kind, **METHODS[kind], "use_dora": True})

    assert [problem.code for problem in caught.value.problems] == [ProblemCode.UNKNOWN_FIELD]
    assert f"PEFT 0.21 has for {kind}" in caught.value.problems[0].expected


@pytest.mark.parametrize("kind", METHODS)
def test_missing_fields_of_each_method_are_named_together(kind: str) -> None:
    with pytest.raises(InvalidAdapterError) as caught:
        AdapterConfig.from_dict({"peft_type": kind})

    assert {problem.code for problem in caught.value.problems} == {ProblemCode.MISSING_FIELD}


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("pissa_niter_16", "path_initial_model_for_weight_conversion"),
        ("OLoRA", "path_initial_model_for_weight_conversion"),
        ("corda", "path_initial_model_for_weight_conversion"),
        ("loftq", "PEFT offers no conversion"),
        ("new", "may change the base weight"),
    ],
)
def test_an_initialisation_that_changes_the_base_says_what_to_do(value: str, advice: str) -> None:
    (problem,) = problems_of(init_lora_weights=value)

    assert advice in problem.expected


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("ADALORA", "lora_E scales the ranks"),
        ("PROMPT_TUNING", "changes no module's weight"),
        ("RANDLORA", "convert_to_lora"),
        ("TRAINABLE_TOKENS", "trainable_token_indices"),
    ],
)
def test_a_method_that_is_not_applied_says_why(kind: str, reason: str) -> None:
    (problem,) = problems_of(peft_type=kind)

    assert reason in problem.expected


@pytest.mark.parametrize(
    ("data", "seems"),
    [
        ({"config": {"non_linearity": "relu"}}, "bottleneck adapter"),
        ({"mm_projector_type": "linear"}, "projector"),
        ({"architectures": ["X"], "model_type": "x"}, "configuration of a model"),
    ],
)
def test_a_file_without_a_method_says_what_it_seems_to_be(
    data: dict[str, object], seems: str
) -> None:
    with pytest.raises(InvalidAdapterError, match=seems):
        AdapterConfig.from_dict(data)


def test_null_is_the_default_of_every_field_that_has_one() -> None:
    nulls = dict.fromkeys(("bias", "use_dora", "modules_to_save", "trainable_token_indices"))

    config = AdapterConfig.from_dict({**PLAIN, **nulls})

    assert (config.bias, config.use_dora, config.modules_to_save) == ("none", False, ())
    assert config.trainable_token_indices is None
