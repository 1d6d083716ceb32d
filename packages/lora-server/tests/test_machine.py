"""What the machine has is read from the system's files, a container's limit among them."""

from __future__ import annotations

import mmap
import os
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lora_server import machine

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1024**3


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:  8388608 kB\nMemFree: 1048576 kB\nMemAvailable: 4194304 kB\n")
    return path


def test_what_is_available_counts_what_can_be_given_up(meminfo: Path, tmp_path: Path) -> None:
    assert machine.host_available_bytes(meminfo, tmp_path / "none") == 4 * GIB


def test_a_containers_limit_comes_first(meminfo: Path, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{2 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {GIB // 2}\n")

    assert machine.host_available_bytes(meminfo, tmp_path) == 3 * GIB // 2
    assert machine.host_total_bytes(tmp_path) <= 3 * GIB


def test_a_container_without_a_limit_has_what_the_machine_has(
    meminfo: Path, tmp_path: Path
) -> None:
    (tmp_path / "memory.max").write_text("max\n")

    assert machine.host_available_bytes(meminfo, tmp_path) == 4 * GIB


def test_without_any_file_the_system_is_asked(tmp_path: Path) -> None:
    nowhere = tmp_path / "none"

    assert 0 < machine.host_available_bytes(nowhere, nowhere) <= machine.host_total_bytes(nowhere)


def test_memory_that_is_written_shows_in_the_process() -> None:
    before = machine.rss_bytes()

    held = np.ones(64 * 1024**2, dtype=np.uint8)

    assert machine.rss_bytes() - before > 0.9 * held.nbytes
    assert machine.peak_rss_bytes() > 0


def test_pages_of_files_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tx\nVmRSS:\t 40 kB\nRssFile:\t  3 kB\n")

    assert machine.file_bytes(tmp_path / "status") == 3 * 1024
    assert machine.file_bytes(tmp_path / "none") == 0
    assert 0 <= machine.file_bytes() <= machine.peak_rss_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which pages are there")
def test_pages_that_were_never_touched_are_not_resident() -> None:
    size = mmap.PAGESIZE
    with mmap.mmap(-1, 64 * size) as area:
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            area.madvise(mmap.MADV_NOHUGEPAGE)
        view = np.frombuffer(area, dtype=np.uint8)
        start = view.ctypes.data
        area[0] = 1
        area[10 * size : 13 * size] = b"x" * (3 * size)

        found = machine.resident_bytes([(start, start + 64 * size)])
        part = machine.resident_bytes([(start + size // 2, start + 2 * size)])
        del view

    assert found in (4 * size, 64 * size)  # all of it where the system tells nothing
    assert part in (size // 2, size * 3 // 2)


def test_where_pages_cannot_be_asked_for_all_of_them_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_PAGEMAP", tmp_path / "none")

    assert machine.resident_bytes([(0, 10), (20, 25)]) == 15
    assert os.sysconf("SC_PAGE_SIZE") > 0
