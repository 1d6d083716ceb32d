"""The README's example does what the README says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """Return the README's only block of that language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return str(found)


def test_the_example_prints_what_stands_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    exec(block("python"), {})

    assert capsys.readouterr().out == block("text")


def test_the_example_is_at_most_fifteen_lines() -> None:
    assert len([line for line in block("python").splitlines() if line.strip()]) <= 15
