"""The rule: whether an answer is the recorded one, differs by a tie, or has moved.

Tokens are compared from the first on, by id where both sides have ids and by text otherwise.

* While tokens are equal, their log-probabilities must agree within the tolerance.
* At the first differing token a tie is allowed: the recorded token and the found one were within
  the tolerance of each other in the recorded alternatives, and the found one is as likely as it was
  recorded, within the tolerance. What follows a flipped tie continues another text and is not
  compared.
* Anything else has moved, and so has an answer that ends earlier or later.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lora_server.smoke.baseline import AnswerToken, BaselinePrompt

_ROUNDING = 1e-9
"""A difference of exactly the tolerance is within it, also after the subtraction is rounded."""
_SHOWN_CHARS = 40
_SHOWN_TOKENS = 8


class Verdict(StrEnum):
    """What became of one prompt."""

    SAME = "same"
    """Same tokens, log-probabilities within the tolerance."""
    TIE = "tie"
    """Another token where two were equally likely, and nothing else."""
    MOVED = "moved"
    FAILED = "failed"
    """There was no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """One prompt's comparison."""

    index: int
    """Position among the recorded prompts of its adapter, from 0."""
    prompt: str
    """As it is shown."""
    verdict: Verdict
    max_drift: float = 0.0
    """Largest difference in log-probability over the tokens that agree."""
    position: int | None = None
    """Of the token that moved or flipped, from 0."""
    recorded: AnswerToken | None = None
    """The token there; None when the recorded answer had ended."""
    found: AnswerToken | None = None
    """The token there; None when the new answer has ended."""
    broken: tuple[str, ...] = ()
    """Expectations of the answer's text that are not met."""
    error: str | None = None
    """Why there was no answer."""

    @property
    def is_broken(self) -> bool:
        """Whether it fails however many prompts may move."""
        return bool(self.broken) or self.verdict is Verdict.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundAnswer:
    """What was answered now."""

    text: str
    tokens: tuple[AnswerToken, ...]


def compare_prompt(
    index: int, recorded: BaselinePrompt, found: FoundAnswer, *, tolerance: float
) -> PromptResult:
    """Judge one answer by the rule, and by what the prompt expects of its text."""
    drift, position = 0.0, None
    verdict = Verdict.SAME
    if recorded.tokens is not None:
        drift, position = _walk(recorded.tokens, found.tokens, tolerance)
    before = _at(recorded.tokens or (), position)
    now = _at(found.tokens, position)
    if position is not None:
        verdict = Verdict.TIE if _is_tie(before, now, tolerance) else Verdict.MOVED
    return PromptResult(
        index=index,
        prompt=shown_prompt(recorded),
        verdict=verdict,
        max_drift=drift,
        position=position,
        recorded=before,
        found=now,
        broken=tuple(_broken(recorded, found.text)),
    )


def failed_prompt(index: int, recorded: BaselinePrompt, error: str) -> PromptResult:
    """Describe a prompt that was not answered."""
    return PromptResult(
        index=index, prompt=shown_prompt(recorded), verdict=Verdict.FAILED, error=error
    )


def shown_prompt(recorded: BaselinePrompt) -> str:
    """Return the beginning of a prompt as it is named in messages."""
    if isinstance(recorded.prompt, str):
        text = recorded.prompt
        return repr(text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}...")
    ids = ", ".join(map(str, recorded.prompt[:_SHOWN_TOKENS]))
    return f"[{ids}{', ...' if len(recorded.prompt) > _SHOWN_TOKENS else ''}]"


def _walk(
    recorded: Sequence[AnswerToken], found: Sequence[AnswerToken], tolerance: float
) -> tuple[float, int | None]:
    """Return the drift over equal tokens, and the first position that is not as recorded."""
    drift = 0.0
    for position, (before, now) in enumerate(zip(recorded, found, strict=False)):
        if not _are_equal(before, now):
            return drift, position
        here = abs(before.logprob - now.logprob)
        drift = max(drift, here)
        if here > tolerance + _ROUNDING:
            return drift, position
    shorter = min(len(recorded), len(found))
    return drift, None if len(recorded) == len(found) else shorter


def _are_equal(before: AnswerToken | None, now: AnswerToken | None) -> bool:
    if before is None or now is None:
        return before is now
    if before.id is not None and now.id is not None:
        return before.id == now.id
    return before.text == now.text


def _is_tie(before: AnswerToken | None, now: AnswerToken | None, tolerance: float) -> bool:
    if before is None or now is None or now.text == before.text or now.text not in before.top:
        return False
    was = before.top[now.text]
    bound = tolerance + _ROUNDING
    return abs(before.logprob - was) <= bound and abs(now.logprob - was) <= bound


def _at(tokens: Sequence[AnswerToken], position: int | None) -> AnswerToken | None:
    return tokens[position] if position is not None and position < len(tokens) else None


def _broken(recorded: BaselinePrompt, text: str) -> list[str]:
    missing = [f"the answer lacks {part!r}" for part in recorded.must_contain if part not in text]
    there = [f"the answer holds {part!r}" for part in recorded.must_not_contain if part in text]
    return missing + there
