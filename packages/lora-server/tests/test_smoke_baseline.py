"""The baseline's file: what is written is read, and everything wrong in it is told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from lora_server.smoke.baseline import (
    AnswerToken,
    Baseline,
    BaselineError,
    BaselineModel,
    BaselinePrompt,
    digest_of,
    parse_baseline,
    read_baseline,
    write_baseline,
)
from lora_server.smoke.prompts import DEFAULT_PROMPTS, read_prompts

if TYPE_CHECKING:
    from pathlib import Path


def content(**changes: Any) -> dict[str, Any]:
    return {
        "format": "lora-server-smoke",
        "version": 1,
        "max_tokens": 8,
        "models": {"sql": {"prompts": [{"prompt": "p", "must_contain": ["x"]}]}},
        **changes,
    }


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    token = AnswerToken(text="\u00e9", id=3, logprob=-0.25, top={"\u00e9": -0.25, "a": -2.0})
    prompts = (
        BaselinePrompt(prompt="p", text="\u00e9", tokens=(token,)),
        BaselinePrompt(prompt=(1, 2), tokens=()),
    )
    model = BaselineModel(answered_by="sql@0123456789ab", prompts=prompts)
    baseline = Baseline(max_tokens=4, models={"sql": model})

    write_baseline(baseline, tmp_path / "b.json")

    assert read_baseline(tmp_path / "b.json") == baseline
    assert list(tmp_path.iterdir()) == [tmp_path / "b.json"]
    assert baseline.models["sql"].digest == "0123456789ab"


@pytest.mark.parametrize(("label", "digest"), [("a@b@0123", "0123"), ("base", None), (None, None)])
def test_the_digest_is_what_follows_the_last_at(label: str | None, digest: str | None) -> None:
    assert digest_of(label) == digest


def test_expectations_alone_are_a_baseline() -> None:
    baseline = parse_baseline(content(rules={"max_moved_prompts": 3}))

    assert baseline.models["sql"].prompts[0].tokens is None
    assert (baseline.rules.tolerance, baseline.rules.max_moved_prompts) == (0.05, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "version: "),
        ({"format": "other"}, "format: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"max_token": 8}, "max_token: there is no such field"),
        ({"models": {}}, "models: "),
        ({"models": {"sql": {"prompts": []}}}, "models.sql.prompts: "),
        ({"models": {"sql": {"prompts": [{"prompt": "p"}]}}}, "neither tokens to compare nor"),
        ({"rules": {"tolerance": -1}}, "rules.tolerance: "),
        ({"rules": {"tolerance": float("nan")}}, "rules.tolerance: "),
    ],
)
def test_what_is_no_baseline_is_refused_with_its_place(changes: Any, words: str) -> None:
    with pytest.raises(BaselineError) as caught:
        parse_baseline(content(**changes))

    assert any(words in problem for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (5, "Input should be a valid string"),
        ("", "String should have at least 1 character"),
        ([], "Tuple should have at least 1 item after validation, not 0"),
        ([3, -1], "1: Input should be greater than or equal to 0"),
        (["x"], "0: Input should be a valid integer"),
    ],
)
def test_a_prompt_that_is_none_has_one_problem_in_its_place(prompt: Any, problem: str) -> None:
    wrong = {"prompt": prompt, "must_contain": ["x"]}

    with pytest.raises(BaselineError) as caught:
        parse_baseline(content(models={"sql": {"prompts": [wrong]}}))

    (found,) = caught.value.problems
    assert found.startswith("models.sql.prompts.0.prompt")
    assert problem in found


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_what_is_no_object_is_told_so(value: Any) -> None:
    with pytest.raises(BaselineError, match=r"^expected an object$"):
        parse_baseline(value)


def test_texts_are_not_taken_for_numbers_and_lone_surrogates_for_text() -> None:
    with pytest.raises(BaselineError, match="max_tokens: Input should be a valid integer"):
        parse_baseline(content(max_tokens="8"))
    with pytest.raises(BaselineError, match="end of hex escape"):
        parse_baseline(content(models={"sql": {"prompts": [{"prompt": "\ud800", "tokens": []}]}}))


def test_all_problems_are_told_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text(json.dumps(content(version=2, max_tokens=0)))

    with pytest.raises(BaselineError) as caught:
        read_baseline(path)

    assert len(caught.value.problems) == 2
    assert all(problem.startswith(f"{path}: ") for problem in caught.value.problems)


def test_a_file_that_is_absent_or_no_json_is_told(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")

    with pytest.raises(BaselineError, match="No such file"):
        read_baseline(tmp_path / "absent")
    with pytest.raises(BaselineError, match="is not JSON"):
        read_baseline(tmp_path / "text")


def test_prompts_come_from_lines_and_from_objects(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\n two\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "x", "must_contain": ["y"]}\n{"prompt": [5]}\n')

    assert [p.prompt for p in read_prompts(tmp_path / "p.txt")] == ["one", " two"]
    first, second = read_prompts(tmp_path / "p.jsonl")
    assert (first.must_contain, second.prompt) == (("y",), (5,))


def test_every_bad_line_of_prompts_is_told(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "x", "must_contains": ["y"]}\n{"prompt": "ok"}\n[]\n{"prompt": ""}\n'
    )

    with pytest.raises(BaselineError) as caught:
        read_prompts(path)

    assert [problem.removeprefix(f"{path}:") for problem in caught.value.problems] == [
        "1: there is no field must_contains",
        "3: a line must be an object with a prompt",
        "4: prompt: String should have at least 1 character",
    ]
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(BaselineError, match="no prompt"):
        read_prompts(tmp_path / "empty.txt")


def test_the_default_prompts_are_different_short_texts() -> None:
    assert len(set(DEFAULT_PROMPTS)) == len(DEFAULT_PROMPTS) >= 5
    assert all(0 < len(prompt) < 80 for prompt in DEFAULT_PROMPTS)
