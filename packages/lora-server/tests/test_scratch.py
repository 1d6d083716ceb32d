"""Scratch folders: those of the living stay, those of the dead go."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from lora_server.model.scratch import remove_abandoned, scratch_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WRITER = """
import sys
from pathlib import Path
from lora_server.model.scratch import scratch_folder

cache = Path(sys.argv[1])
with scratch_folder(cache, cache / "key") as folder:
    (folder / "weights").write_text("half")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Return a process that writes into the cache `tmp_path` until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def folder_of(writer: subprocess.Popen[str]) -> str:
    assert writer.stdout is not None
    return writer.stdout.readline().strip().rpartition("/")[2]


def names(cache: Path) -> list[str]:
    return [path.name for path in (cache / "key").iterdir()]


def test_a_folder_is_there_while_it_is_used(tmp_path: Path) -> None:
    with scratch_folder(tmp_path, tmp_path / "key") as folder:
        assert folder.parent == tmp_path / "key"
        assert folder.is_dir()

    assert names(tmp_path) == []


def test_a_folder_goes_with_the_error_that_ends_its_block(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), scratch_folder(tmp_path, tmp_path / "key"):
        raise OSError("full")

    assert names(tmp_path) == []


def test_what_a_killed_process_left_is_removed(
    tmp_path: Path, writer: subprocess.Popen[str]
) -> None:
    left = folder_of(writer)
    writer.kill()
    writer.wait()
    assert names(tmp_path) == [left]

    remove_abandoned(tmp_path)

    assert names(tmp_path) == []


def test_the_next_writer_removes_it_too(tmp_path: Path, writer: subprocess.Popen[str]) -> None:
    left = folder_of(writer)
    writer.kill()
    writer.wait()

    with scratch_folder(tmp_path, tmp_path / "other") as folder:
        assert left not in names(tmp_path)
        assert folder.is_dir()


def test_the_folder_of_a_living_process_stays(
    tmp_path: Path, writer: subprocess.Popen[str]
) -> None:
    living = folder_of(writer)

    remove_abandoned(tmp_path)
    with scratch_folder(tmp_path, tmp_path / "key") as folder:
        assert sorted(names(tmp_path)) == sorted([living, folder.name])
    assert (tmp_path / "key" / living / "weights").read_text() == "half"

    assert writer.stdin is not None
    writer.stdin.close()
    assert writer.wait() == 0
    assert names(tmp_path) == []


def test_what_is_no_scratch_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "key" / "model").mkdir(parents=True)

    remove_abandoned(tmp_path)

    assert names(tmp_path) == ["model"]
