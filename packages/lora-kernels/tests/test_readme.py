"""The README's example runs and prints what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_the_example_prints_what_the_readme_shows() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    ((example, shown),) = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", readme, re.DOTALL)

    done = subprocess.run(
        [sys.executable, "-c", example], check=True, capture_output=True, text=True
    )

    assert done.stdout == shown
    assert len(example.strip().splitlines()) <= 15
