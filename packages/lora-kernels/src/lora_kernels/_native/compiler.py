"""From C++ sources to a loaded library: compiled once for this processor, and kept.

The library is linked against the OpenMP runtime by name, so that it shares torch's workers: two
teams of threads on the same cores would wait for each other.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from lora_kernels.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-std=c++17", "-shared", "-fPIC", "-w")
TIMEOUT_S = 300
_ERROR_LINES = 3


def default_cache_dir() -> Path:
    """Return where libraries are kept: a folder of the user's own."""
    return Path.home() / ".cache" / "lora-kernels"


def headers_dir() -> Path:
    """Return the folder of this package's headers: products, LoRA, and what they share."""
    return Path(__file__).parent


def load_library(sources: Sequence[Path], *, cache_dir: Path | None = None) -> ctypes.CDLL:
    """Compile sources, unless that was done before on this processor, and load the result.

    Args:
        sources: C++ files; they are compiled together. They may include headers that lie beside
            them, and those of `headers_dir`.
        cache_dir: where the library is kept; None is `default_cache_dir`. It must be writable by
            nobody else, since what lies there is run.

    Raises:
        BackendUnavailableError: there is no compiler, the processor or the system lacks what the
            sources need, or the folder cannot be written; the message says which.
    """
    compiler = _find_compiler()
    folder = default_cache_dir() if cache_dir is None else cache_dir
    target = folder / f"{sources[0].stem}-{_key(compiler, sources)}.so"
    try:
        if not target.is_file():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _compile(compiler, sources, target)
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise BackendUnavailableError(f"native kernels: {target}: {error}") from error


def _find_compiler() -> str:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        system = f"{platform.system()} on {platform.machine()}"
        raise BackendUnavailableError(f"native kernels: found {system}, expected Linux on x86_64")
    for name in COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise BackendUnavailableError(
        f"native kernels: no C++ compiler, expected one of {', '.join(COMPILERS)}"
    )


def _key(compiler: str, sources: Sequence[Path]) -> str:
    """Hash all that the result depends on; `-march=native` makes the processor part of it."""
    version = _run([compiler, "--version"])
    digest = hashlib.sha256()
    for part in (version.stdout, *FLAGS, _processor()):
        digest.update(part.encode() + b"\0")
    folders = {source.parent for source in sources} | {headers_dir()}
    headers = sorted(header for folder in folders for header in folder.glob("*.h"))
    for file in (*sources, *headers):
        digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _processor() -> str:
    """Return what this processor can do, as the system says it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    wanted = ("flags", "model name", "vendor_id")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: str, sources: Sequence[Path], target: Path) -> None:
    """Write the library under another name first: several processes may be at it."""
    number, name = tempfile.mkstemp(dir=target.parent, prefix="partial-", suffix=".so")
    os.close(number)
    partial = Path(name)
    try:
        include = f"-I{headers_dir()}"
        done = _run([compiler, *FLAGS, include, *map(str, sources), "-o", str(partial)])
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            reason = "; ".join(lines[:_ERROR_LINES]) or done.stderr[-300:]
            raise BackendUnavailableError(f"native kernels: {compiler} failed: {reason}")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(  # noqa: S603 - our own flags and files
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise BackendUnavailableError(
            f"native kernels: {command[0]} took longer than {TIMEOUT_S} s"
        ) from error
