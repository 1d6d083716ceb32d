"""How libraries are loaded: what the collector sees, which files are read ahead."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from lora_server.cli.libraries import loading_libraries, read_ahead, release_libraries
from lora_server.machine import host_available_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_JOIN_S = 30
_FILE_BYTES = 9 * 2**20

# Heavy packages that are often installed; and the commands' and the other tasks' own parts.
_LOAD_THE_SERVICE = """
import gc, sys
from lora_server.cli.libraries import loading_libraries
with loading_libraries():
    from lora_server.cli import build, listen
unneeded = {
    "IPython", "datasets", "gguf", "matplotlib", "pandas", "peft", "pyarrow", "pytest", "scipy",
    "sklearn", "torchaudio", "torchvision",
    "lora_server.cli.bench", "lora_server.cli.build_pooling", "lora_server.cli.demo",
    "lora_server.otlp",
}
print("UNNEEDED", sorted(unneeded & set(sys.modules)))
print("FROZEN", gc.get_freeze_count() > 100_000)
"""


@pytest.fixture(autouse=True)
def _usual_collector() -> Iterator[None]:
    yield
    release_libraries()
    gc.enable()


def test_nothing_is_collected_while_libraries_load_and_what_they_made_is_left_alone_later() -> None:
    with loading_libraries():
        is_enabled_meanwhile = gc.isenabled()

    assert not is_enabled_meanwhile
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0

    release_libraries()
    assert gc.get_freeze_count() == 0


def test_a_load_that_fails_leaves_the_collector_as_it_was() -> None:
    gc.unfreeze()

    with pytest.raises(ImportError), loading_libraries():
        raise ImportError("no such library")

    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()

    with loading_libraries():
        pass

    assert not gc.isenabled()


def test_the_start_of_a_server_loads_no_library_that_serving_does_not_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOAD_THE_SERVICE], capture_output=True, text=True, check=True
    )

    assert done.stdout.split("\n")[:2] == ["UNNEEDED []", "FROZEN True"]


def test_the_weights_of_a_folder_are_in_the_file_cache_once_they_were_read_ahead(
    tmp_path: Path,
) -> None:
    files = [tmp_path / f"model-{i}.safetensors" for i in range(2)]
    for file in files:
        file.write_bytes(os.urandom(_FILE_BYTES))
        _evict(file)

    read_ahead(str(tmp_path)).join(_JOIN_S)

    assert [_is_cached(file) for file in files] == [True, True]


@pytest.mark.parametrize("name", ["", "missing", "organisation/name"])
def test_a_model_without_files_here_is_not_read_ahead_and_not_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    reader = read_ahead(name)
    reader.join(_JOIN_S)

    assert not reader.is_alive()


def test_files_larger_than_half_of_the_free_memory_are_not_read_ahead(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as opened:
        opened.truncate(host_available_bytes() // 2 + 2**30)

    reader = read_ahead(str(tmp_path))
    reader.join(_JOIN_S)

    assert not reader.is_alive()
    assert not _is_cached(file)


def _evict(file: Path) -> None:
    """Take a file out of the system's cache, on file systems that have one."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _is_cached(file: Path) -> bool:
    """Whether the first and the last page of a file are in the system's cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        pages = (len(mapped) + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        states = (ctypes.c_ubyte * pages)()
        status = libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(mapped)), states)
    assert status == 0, os.strerror(ctypes.get_errno())
    return bool(states[0] & 1 and states[pages - 1] & 1)
