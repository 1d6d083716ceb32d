"""The file of a smoke baseline: prompts, and what the base and each adapter answered to them.

Written by `lora-server smoke record`; may be written or completed by hand. Fields that are not
known are refused by name, so that a misspelt expectation is not ignored.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pydantic_core import ErrorDetails

FORMAT: Final = "lora-server-smoke"
VERSION: Final = 1
NUM_TOP: Final = 5
"""Alternatives kept for each token; OpenAI's own service gives no more for completions."""
DEFAULT_TOLERANCE: Final = 0.05
"""In log-probability: 5 % of a token's chance."""
MAX_PROMPTS: Final = 256
"""For one adapter."""
MAX_TOKENS: Final = 1024
"""Of one answer."""
_MAX_PROBLEMS: Final = 20

Finite = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]


def _kind_of_prompt(value: Any) -> str:
    return "<tokens>" if isinstance(value, list | tuple) else "<text>"


# The tags stand in angle brackets, so that messages can leave them out.
Prompt = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[TokenIds, Tag("<tokens>")],
    Discriminator(_kind_of_prompt),
]


class BaselineError(ValueError):
    """A file, or a part of a request, is no smoke baseline; `problems` lists every reason."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problems))


class _Part(BaseModel):
    """Base of everything in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


P = TypeVar("P", bound=_Part)


class AnswerToken(_Part):
    """One token of an answer."""

    text: str
    id: int | None = None
    """None where the server gives no ids."""
    logprob: Finite
    """Natural logarithm."""
    top: dict[str, Finite] = Field(default_factory=dict)
    """Log-probabilities of the most likely tokens here, by text, the token itself included."""


class BaselinePrompt(_Part):
    """One prompt, what was answered, and what an answer must fulfil."""

    prompt: Prompt
    text: str | None = None
    """The answer as it was."""
    tokens: tuple[AnswerToken, ...] | None = None
    """Its tokens; None compares nothing, so that only the expectations below count."""
    must_contain: tuple[Text, ...] = ()
    """Texts that an answer must hold, all of them."""
    must_not_contain: tuple[Text, ...] = ()
    """Texts that no answer may hold."""

    @property
    def has_expectations(self) -> bool:
        """Whether anything is asked of the answer's text."""
        return bool(self.must_contain or self.must_not_contain)

    @model_validator(mode="after")
    def check_that_something_is_asked(self) -> Self:
        """Refuse a prompt to which every answer is right."""
        if self.tokens is None and not self.has_expectations:
            msg = "there are neither tokens to compare nor must_contain or must_not_contain"
            raise ValueError(msg)
        return self


class BaselineModel(_Part):
    """What one name answered."""

    is_base: bool = False
    answered_by: str | None = None
    """The header `X-LoRA-Adapter` of the answers; None where the server has none."""
    prompts: Annotated[tuple[BaselinePrompt, ...], Field(min_length=1, max_length=MAX_PROMPTS)]

    @property
    def digest(self) -> str | None:
        """First characters of the digest of the version that answered."""
        return digest_of(self.answered_by)


class Rules(_Part):
    """How far answers may move."""

    tolerance: Annotated[Finite, Field(ge=0.0)] = DEFAULT_TOLERANCE
    """In log-probability."""
    max_moved_prompts: Annotated[int, Field(ge=0)] = 0
    """Prompts of one adapter that may move and still pass; an update usually means some to."""


class Baseline(_Part):
    """The whole file."""

    format: Literal["lora-server-smoke"] = FORMAT
    version: Literal[1] = VERSION
    created_utc: str | None = None
    server: str | None = None
    """Where it was recorded; for people."""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Longest answer, as asked for."""
    rules: Rules = Rules()
    models: Annotated[dict[Text, BaselineModel], Field(min_length=1)]

    @property
    def base_name(self) -> str | None:
        """The name of the base, where it was recorded."""
        return next((name for name, model in self.models.items() if model.is_base), None)


def digest_of(answered_by: str | None) -> str | None:
    """Return the digest in a header `NAME@DIGEST12`; None for the base and for no header."""
    _, at, digest = (answered_by or "").rpartition("@")
    return digest if at else None


def parse_baseline(content: Any) -> Baseline:
    """Check what JSON has become.

    Raises:
        BaselineError: with every problem found, up to twenty.
    """
    return _parse(Baseline, content)


def parse_prompt(content: Any) -> BaselinePrompt:
    """Check one prompt of a file.

    Raises:
        BaselineError: with every problem found.
    """
    return _parse(BaselinePrompt, content)


def _parse(kind: type[P], content: Any) -> P:
    try:
        # through text: JSON's lists are tuples there, while numbers and texts stay what they are
        return kind.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        raise BaselineError(_sentences(error.errors())[:_MAX_PROBLEMS]) from error


def read_baseline(path: Path) -> Baseline:
    """Read a file.

    Raises:
        BaselineError: it cannot be read, is no JSON, or is no baseline.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BaselineError([f"{path}: {error.strerror or error}"]) from error
    except ValueError as error:
        raise BaselineError([f"{path} is not JSON: {error}"]) from error
    try:
        return parse_baseline(content)
    except BaselineError as error:
        raise BaselineError([f"{path}: {problem}" for problem in error.problems]) from error


def write_baseline(baseline: Baseline, path: Path) -> None:
    """Write a file, whole or not at all: the one that is there may guard a running server."""
    beside = path.with_name(f".{path.name}.new")
    text = json.dumps(baseline.model_dump(exclude_none=True), indent=1, ensure_ascii=False)
    beside.write_text(text + "\n", encoding="utf-8")
    beside.replace(path)


def _sentences(items: Sequence[ErrorDetails]) -> list[str]:
    """Turn pydantic's errors into `where: what`, without lists that are short for want of items."""
    places = [item["loc"] for item in items]
    return [
        _sentence(item)
        for item in items
        if item["type"] != "too_short"
        or not any(
            len(item["loc"]) < len(p) and p[: len(item["loc"])] == item["loc"] for p in places
        )
    ]


def _sentence(item: ErrorDetails) -> str:
    where = ".".join(part for part in map(str, item["loc"]) if not part.startswith("<"))
    what = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        what = "there is no such field"
    elif item["type"] in {"model_type", "model_attributes_type", "dict_type"}:
        what = "expected an object"
    return f"{where}: {what}" if where else what
