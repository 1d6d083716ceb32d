"""The command of the first screen of the README, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

from support.server import run_to_end

WITHIN_S = 300.0
"""The first run on a machine converts the embedded model, which takes half a minute."""


def test_demo_once_answers_with_every_adapter_and_exits_with_0() -> None:
    prepared = run_to_end("demo", "--prepare", within_s=WITHIN_S)
    shown = run_to_end("demo", "--once", within_s=WITHIN_S)

    assert prepared.returncode == 0, prepared.stderr
    names = json.loads(prepared.stdout)
    assert Path(names["model"], "config.json").is_file()
    assert len(names["adapters"]) == 3
    assert all(Path(path, "adapter_config.json").is_file() for path in names["adapters"].values())
    assert shown.returncode == 0, shown.stderr + shown.stdout
    assert [name for name in names["adapters"] if name not in shown.stdout] == []
    assert Path(names["model"]).name in shown.stdout


def test_help_and_mistakes_are_answered_in_words() -> None:
    help_text = run_to_end("--help")
    mistake = run_to_end("serve", "/nowhere", "--max-lorras", "4")

    assert help_text.returncode == 0
    assert all(command in help_text.stdout for command in ("serve", "demo", "bench"))
    assert mistake.returncode in {1, 2}
    assert "--max-lorras" in mistake.stderr
    assert "Traceback" not in mistake.stderr
