"""A short run of the fuzz program, and proof that it would notice."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lora_weights import ProblemCode, inspect_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

PROGRAM = Path(__file__).with_name("fuzz_inspect.py")


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_inspect", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def alarm(program: ModuleType) -> Iterator[None]:
    before = signal.signal(signal.SIGPROF, program._on_alarm)
    yield
    signal.signal(signal.SIGPROF, before)


def test_three_hundred_broken_adapters_are_all_reported() -> None:
    result = subprocess.run(
        [sys.executable, PROGRAM, "--count", "300", "--seed", "7"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert "300 cases, seed 7" in result.stdout
    assert "weights_unreadable" in result.stdout
    assert "loads" in result.stdout


def test_one_case_is_always_the_same(program: ModuleType, tmp_path: Path) -> None:
    folders = program.seeds(tmp_path)

    outcomes = [
        [program.run_case(i, 3, folders, 60.0, show=False) for i in range(20)] for _ in range(2)
    ]

    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("token", [2**31, 2**63, 10**400])
def test_a_token_that_no_vocabulary_can_have_is_refused(
    program: ModuleType, tmp_path: Path, token: int
) -> None:
    [folder] = [path for path in program.seeds(tmp_path) if path.name == "tokens"]
    config = json.loads((folder / "adapter_config.json").read_text())
    config["trainable_token_indices"] = {"embed_tokens": [1, token]}
    (folder / "adapter_config.json").write_text(json.dumps(config))

    report = inspect_adapter(folder)

    assert ProblemCode.INVALID_FIELD in [problem.code for problem in report.problems]


@pytest.mark.parametrize("rank", [2**31, 10**400])
@pytest.mark.parametrize("field", ["r", "rank_pattern"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_rank_that_no_float_can_hold_is_refused(
    program: ModuleType, tmp_path: Path, field: str, rank: int, use_rslora: bool
) -> None:
    folder = program.seeds(tmp_path)[0]
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {field: rank if field == "r" else {"q_proj": rank}, "use_rslora": use_rslora}
    (folder / "adapter_config.json").write_text(json.dumps(config))

    report = inspect_adapter(folder)

    assert ProblemCode.INVALID_FIELD in [problem.code for problem in report.problems]


def _raise(*_: Any, **__: Any) -> Any:
    raise KeyError("found")


def _hang(*_: Any, **__: Any) -> Any:
    while True:
        pass


@pytest.mark.parametrize(
    ("replacement", "outcome"), [(_raise, "exception"), (_hang, "hang")], ids=["raise", "hang"]
)
@pytest.mark.usefixtures("alarm")
def test_an_exception_and_a_hang_are_noticed(
    program: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replacement: Any,
    outcome: str,
) -> None:
    folders = program.seeds(tmp_path)
    monkeypatch.setattr(program, "inspect_adapter", replacement)

    found = program.run_case(0, 1, folders, 0.5, show=False)

    assert found == outcome
