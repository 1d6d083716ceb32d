"""The outcome of a check: per name and as a whole, in sentences and as JSON.

A name passes when every prompt was answered, every expectation is met, and no more prompts moved
than the rules allow.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_server.smoke.compare import Verdict

if TYPE_CHECKING:
    from lora_server.smoke.baseline import AnswerToken, Rules
    from lora_server.smoke.compare import PromptResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """One name's comparison."""

    name: str
    rules: Rules
    digest_recorded: str | None
    digest_found: str | None
    prompts: tuple[PromptResult, ...]

    @property
    def num_moved(self) -> int:
        """Prompts that moved."""
        return sum(result.verdict is Verdict.MOVED for result in self.prompts)

    @property
    def has_passed(self) -> bool:
        """Whether the name may be served as it is."""
        is_broken = any(result.is_broken for result in self.prompts)
        return not is_broken and self.num_moved <= self.rules.max_moved_prompts

    @property
    def digest_line(self) -> str:
        """Say whether the content is the recorded one."""
        before, now = self.digest_recorded, self.digest_found
        if before is now is None:
            return "no digest"
        if before is None or now is None:
            return "the digest is not known"
        length = min(len(before), len(now))
        if before[:length] == now[:length]:
            return f"digest {before[:12]} as recorded"
        return f"the digest changed from {before[:12]} to {now[:12]}"

    @property
    def summary(self) -> str:
        """Say in one line what became of it."""
        counts = Counter(result.verdict for result in self.prompts)
        parts = [f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict]]
        largest = max(result.max_drift for result in self.prompts)
        return (
            f"{', '.join(parts)} of {len(self.prompts)} prompts, "
            f"largest drift {largest:.4f}; {self.digest_line}"
        )

    def sentences(self) -> list[str]:
        """Name every prompt that is not the same, with its token."""
        return [
            f"prompt {result.index + 1} {result.prompt}: {text}"
            for result in self.prompts
            for text in _sentences(result)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "passed": self.has_passed,
            "digest_recorded": self.digest_recorded,
            "digest_found": self.digest_found,
            "tolerance": self.rules.tolerance,
            "max_moved_prompts": self.rules.max_moved_prompts,
            "prompts": [_prompt_dict(result) for result in self.prompts],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The comparison of a server with a baseline."""

    models: tuple[ModelResult, ...]
    not_served: tuple[str, ...]
    """Recorded names that the server does not have."""
    not_recorded: tuple[str, ...]
    """Adapters that the server has and the baseline does not; they fail nothing."""

    @property
    def has_passed(self) -> bool:
        """Whether every recorded name is there and passed."""
        return not self.not_served and all(model.has_passed for model in self.models)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "passed": self.has_passed,
            "models": {model.name: model.as_dict() for model in self.models},
            "not_served": list(self.not_served),
            "not_recorded": list(self.not_recorded),
        }


def _sentences(result: PromptResult) -> list[str]:
    found = list(result.broken)
    if result.error is not None:
        found.append(result.error)
    if result.position is not None:
        what = "a tie flipped at" if result.verdict is Verdict.TIE else "moved at"
        found.append(
            f"{what} token {result.position + 1}: "
            f"recorded {_shown(result.recorded)}, found {_shown(result.found)}"
        )
    return found


def _shown(token: AnswerToken | None) -> str:
    return "the end" if token is None else f"{token.text!r} ({token.logprob:.4f})"


def _prompt_dict(result: PromptResult) -> dict[str, Any]:
    return {
        "index": result.index,
        "prompt": result.prompt,
        "verdict": result.verdict.value,
        "max_drift": result.max_drift,
        "position": result.position,
        "recorded": _token_dict(result.recorded),
        "found": _token_dict(result.found),
        "broken": list(result.broken),
        "error": result.error,
    }


def _token_dict(token: AnswerToken | None) -> dict[str, Any] | None:
    return None if token is None else token.model_dump(exclude={"top"})
