"""The file of `--gate` is checked before a model is loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from lora_server.cli.gate_file import gate_file
from lora_server.config import ServerConfig, Task
from lora_server.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path

RIGHT = {"max_tokens": 4, "models": {"a": {"prompts": [{"prompt": "p", "must_contain": ["x"]}]}}}


def config(path: Path) -> ServerConfig:
    return ServerConfig(model="m", gate=str(path))


def test_a_baseline_is_taken_and_none_is_none(tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    path.write_text(json.dumps(RIGHT))

    assert gate_file(config(path), Task.GENERATE) == path
    assert gate_file(ServerConfig(model="m"), Task.CLASSIFY) is None


def test_every_problem_of_the_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    path.write_text(json.dumps({**RIGHT, "max_tokens": 0, "version": 7}))

    with pytest.raises(StartupError) as caught:
        gate_file(config(path), Task.GENERATE)

    assert len(caught.value.problems) == 2
    assert all(problem.startswith(f"--gate: {path}: ") for problem in caught.value.problems)
    with pytest.raises(StartupError, match="No such file"):
        gate_file(config(tmp_path / "absent"), Task.GENERATE)


def test_a_model_that_does_not_generate_has_no_gate(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="needs a model that generates, and the task is embed"):
        gate_file(config(tmp_path / "gate.json"), Task.EMBED)


def test_a_gate_needs_adapters() -> None:
    with pytest.raises(StartupError, match="--gate needs adapters"):
        ServerConfig(model="m", gate="g.json", enable_lora=False)
