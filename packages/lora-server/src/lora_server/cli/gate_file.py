"""Checks the file of `--gate` before the model is loaded. It is read again at every update."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lora_server.config import Task
from lora_server.errors import StartupError
from lora_server.smoke.baseline import BaselineError, read_baseline

if TYPE_CHECKING:
    from lora_server.config import ServerConfig


def gate_file(config: ServerConfig, task: Task) -> Path | None:
    """Return the file that updates are gated by.

    Raises:
        StartupError: it is no baseline, or the model does not generate.
    """
    if config.gate is None:
        return None
    if task is not Task.GENERATE:
        raise StartupError([f"--gate needs a model that generates, and the task is {task}"])
    path = Path(config.gate).expanduser()
    try:
        read_baseline(path)
    except BaselineError as error:
        raise StartupError([f"--gate: {problem}" for problem in error.problems]) from error
    return path
