"""The rule by which an answer is the recorded one, differs by a tie, or has moved."""

from __future__ import annotations

from typing import Any

import pytest

from lora_server.smoke.baseline import AnswerToken, BaselinePrompt, Rules
from lora_server.smoke.compare import FoundAnswer, PromptResult, Verdict, compare_prompt
from lora_server.smoke.report import CheckResult, ModelResult

TOLERANCE = 0.1


def token(
    text: str, logprob: float = -0.5, token_id: int | None = None, **top: float
) -> AnswerToken:
    return AnswerToken(text=text, id=token_id, logprob=logprob, top={text: logprob, **top})


def judge(
    recorded: list[AnswerToken] | None, found: list[AnswerToken], **expectations: Any
) -> PromptResult:
    prompt = BaselinePrompt(
        prompt="p", tokens=None if recorded is None else tuple(recorded), **expectations
    )
    answer = FoundAnswer(text="".join(t.text for t in found), tokens=tuple(found))
    return compare_prompt(0, prompt, answer, tolerance=TOLERANCE)


def test_equal_tokens_within_the_tolerance_are_the_same() -> None:
    result = judge([token("a", -0.5), token("b", -1.0)], [token("a", -0.55), token("b", -0.9)])

    assert result.verdict is Verdict.SAME
    assert result.max_drift == pytest.approx(0.1)
    assert (result.position, result.recorded, result.found) == (None, None, None)


def test_an_equal_token_beyond_the_tolerance_has_moved_and_is_named() -> None:
    result = judge([token("a"), token("b", -1.0)], [token("a"), token("b", -1.11)])

    assert (result.verdict, result.position) == (Verdict.MOVED, 1)
    assert result.recorded is not None
    assert result.found is not None
    assert (result.recorded.logprob, result.found.logprob) == (-1.0, -1.11)


def test_a_tie_may_flip_and_what_follows_is_not_compared() -> None:
    result = judge(
        [token("a"), token("b", -0.70, c=-0.75), token("d")],
        [token("a"), token("c", -0.72), token("e", -9.0), token("f")],
    )

    assert (result.verdict, result.position) == (Verdict.TIE, 1)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (token("b", -0.70, c=-0.81), token("c", -0.75)),
        (token("b", -0.70), token("c", -0.70)),
        (token("b", -0.70, c=-0.75), token("c", -0.60)),
    ],
    ids=["they were apart", "it was no alternative", "it became more likely"],
)
def test_another_token_that_was_no_tie_has_moved(before: AnswerToken, now: AnswerToken) -> None:
    assert judge([before], [now]).verdict is Verdict.MOVED


def test_a_drift_before_a_tie_is_a_move() -> None:
    result = judge([token("a", -0.5), token("b", c=-0.5)], [token("a", -0.7), token("c")])

    assert (result.verdict, result.position) == (Verdict.MOVED, 0)


@pytest.mark.parametrize(("recorded", "found"), [("ab", "a"), ("a", "ab"), ("a", ""), ("", "a")])
def test_an_answer_that_ends_elsewhere_has_moved(recorded: str, found: str) -> None:
    result = judge(list(map(token, recorded)), list(map(token, found)))

    assert result.verdict is Verdict.MOVED
    assert result.position == min(len(recorded), len(found))
    assert None in (result.recorded, result.found)


def test_ids_decide_where_both_sides_have_them_and_texts_otherwise() -> None:
    assert judge([token("x", token_id=1)], [token("x", token_id=2)]).verdict is Verdict.MOVED
    assert judge([token("x", token_id=1)], [token("y", token_id=1)]).verdict is Verdict.SAME
    assert judge([token("x", token_id=1)], [token("x")]).verdict is Verdict.SAME
    assert judge([token("x", token_id=1)], [token("y")]).verdict is Verdict.MOVED


def test_expectations_are_asked_of_the_text_whatever_moved() -> None:
    result = judge(
        None,
        [token("SELECT"), token(" 1")],
        must_contain=["SELECT", "FROM"],
        must_not_contain=["1"],
    )

    assert result.verdict is Verdict.SAME
    assert result.broken == ("the answer lacks 'FROM'", "the answer holds '1'")


def model(*results: PromptResult, **rules: Any) -> ModelResult:
    return ModelResult(
        name="sql",
        rules=Rules(**rules),
        digest_recorded="a" * 12,
        digest_found="a" * 64,
        prompts=results,
    )


SAME = judge([token("a")], [token("a")])
TIE = judge([token("a", b=-0.5)], [token("b")])
MOVED = judge([token("a")], [token("b")])
BROKEN = judge([token("a")], [token("a")], must_contain=["z"])


def test_a_name_passes_with_ties_and_with_as_many_moves_as_the_rules_allow() -> None:
    assert model(SAME, TIE).has_passed
    assert not model(SAME, MOVED).has_passed
    assert model(MOVED, SAME, max_moved_prompts=1).has_passed
    assert not model(MOVED, MOVED, max_moved_prompts=1).has_passed
    assert not model(BROKEN, SAME, max_moved_prompts=9).has_passed


def test_a_report_names_prompt_token_and_digests() -> None:
    changed = ModelResult(
        name="sql",
        rules=Rules(),
        digest_recorded="a" * 12,
        digest_found="b" * 64,
        prompts=(SAME, MOVED),
    )

    assert changed.sentences() == [
        "prompt 1 'p': moved at token 1: recorded 'a' (-0.5000), found 'b' (-0.5000)"
    ]
    assert "1 same, 1 moved of 2 prompts" in changed.summary
    assert changed.digest_line == f"the digest changed from {'a' * 12} to {'b' * 12}"
    assert model(SAME).digest_line == f"digest {'a' * 12} as recorded"


def test_a_check_fails_for_what_is_not_served_and_not_for_what_is_new() -> None:
    passed = CheckResult(models=(model(SAME),), not_served=(), not_recorded=("new",))
    lost = CheckResult(models=(model(SAME),), not_served=("old",), not_recorded=())

    assert (passed.has_passed, lost.has_passed) == (True, False)
    assert lost.as_dict()["models"]["sql"]["prompts"][0]["verdict"] == "same"
