"""The command as people meet it: help is quick and light, mistakes have a status."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from lora_server.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path

_HELP_AND_MODULES = """
import sys
from lora_server.cli.main import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"torch", "transformers", "fastapi", "uvicorn", "httpx"} & set(sys.modules)
    print("HEAVY", sorted(heavy))
"""


@pytest.mark.parametrize("command", [(), ("serve",), ("demo",), ("bench",), ("smoke", "check")])
def test_help_loads_nothing_heavy_and_comes_within_a_second(command: tuple[str, ...]) -> None:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _HELP_AND_MODULES, *command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    seconds = time.perf_counter() - start

    assert "usage: lora-server" in done.stdout
    assert "HEAVY []" in done.stdout
    # 0.15 s on an idle machine; the bound leaves room for a busy one
    assert seconds < 5


def test_the_help_lists_the_commands_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])

    assert caught.value.code == 0
    listed = [
        line.split()[0]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("    ") and not line[4:].startswith(" ")
    ]
    assert listed == ["serve", "demo", "bench", "doctor", "plan", "smoke"]


@pytest.mark.parametrize(
    "arguments", [(), ("what",), ("demo", "--what"), ("bench", "--num-prompts", "0"), ("demo", "x")]
)
def test_a_command_line_that_is_not_understood_has_status_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_every_problem_of_a_start_is_printed_and_the_status_is_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status = main(
        ["serve", "m", "--max-loras", "0", "--lora-dir", str(tmp_path / "absent"), "--what"]
    )

    assert status == 1
    output = capsys.readouterr()
    assert output.out == ""
    for text in ("--max-loras is 0", "absent", "unknown option --what"):
        assert output.err.count(text) == 1


def test_the_module_can_be_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lora_server.cli.main", "serve", "m", "--port", "x"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )

    assert done.returncode == 1
    assert "--port: 'x' is not a whole number" in done.stderr
