"""The README's example does what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """Return the README's only block of that language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return str(found)


def test_the_example_prints_what_stands_below_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", block("python")], capture_output=True, text=True, check=True
    )

    assert done.stdout == block("text")


def test_the_example_is_at_most_fifteen_lines() -> None:
    lines = [line for line in block("python").splitlines() if line.strip()]

    assert len(lines) <= 15
