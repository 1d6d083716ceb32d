"""What is asked when nobody says what, and the files in which people say it.

A text file has one prompt a line. A `.jsonl` file has one object a line: `prompt` (text or token
ids), and, where wanted, `must_contain` and `must_not_contain`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from lora_server.smoke.baseline import BaselineError, BaselinePrompt, parse_prompt

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_PROMPTS: Final = (
    "The three things a good summary needs are",
    "Question: Why does ice float on water?\nAnswer:",
    "def reverse_words(sentence: str) -> str:\n",
    "Dear customer, thank you for your message. ",
    "Translate to French: The train leaves at noon.\nFrench:",
    "SELECT name, total FROM orders WHERE ",
    "Once the lights went out, nobody in the theatre ",
    '{"city": "Oslo", "country": ',
)
"""Prose, a question, code, a letter, a translation, a query, a story and data: most adapters move
at least one of them."""

_FIELDS: Final = frozenset({"prompt", "must_contain", "must_not_contain"})


def read_prompts(path: Path) -> tuple[BaselinePrompt, ...]:
    """Read a file of prompts; `tokens` is empty until they are answered.

    Raises:
        BaselineError: with every line that is not understood.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise BaselineError([f"{path}: {error}"]) from error
    parse = _parse_object if path.suffix == ".jsonl" else unanswered
    prompts: list[BaselinePrompt] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(parse(line))
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    if not prompts and not problems:
        problems.append(f"{path} has no prompt")
    if problems:
        raise BaselineError(problems)
    return tuple(prompts)


def unanswered(prompt: str) -> BaselinePrompt:
    """Make a prompt that nobody has answered yet."""
    return BaselinePrompt(prompt=prompt, tokens=())


def _parse_object(line: str) -> BaselinePrompt:
    content: Any = json.loads(line)
    if not isinstance(content, dict):
        raise ValueError("a line must be an object with a prompt")  # noqa: TRY004 - a file's fault
    unknown = sorted(content.keys() - _FIELDS)
    if unknown:
        raise ValueError(f"there is no field {', '.join(unknown)}")
    return parse_prompt({**content, "tokens": ()})
