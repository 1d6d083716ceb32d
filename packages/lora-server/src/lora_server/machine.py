"""What the machine and the process have: host memory, limits of a container, resident pages.

Reads the files of Linux; elsewhere it falls back to what every system tells. Knows no tensors.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

_MEMINFO, _STATM = Path("/proc/meminfo"), Path("/proc/self/statm")
_STATUS = Path("/proc/self/status")
_PAGEMAP = Path("/proc/self/pagemap")
_CGROUP = Path("/sys/fs/cgroup")
_PRESENT = np.uint64(1 << 63)
_ENTRY_BYTES = 8
_PAGES_AT_ONCE = 1 << 20


def host_total_bytes(cgroup: Path = _CGROUP) -> int:
    """Return the host memory there is: the machine's, or the container's limit if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read_number(cgroup / "memory.max")
    return total if limit is None else min(total, limit)


def host_available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return what a new process could take, kept files given up, within the container's limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name, value in _pairs(meminfo):
        if name == "MemAvailable":
            available = value * 1024
    limit, used = _read_number(cgroup / "memory.max"), _read_number(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    kept = dict(_pairs(cgroup / "memory.stat")).get("inactive_file", 0)
    return min(available, limit - used + kept)


def rss_bytes() -> int:
    """Return the resident memory of this process; where nothing tells, the largest it has been."""
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return peak_rss_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def file_bytes(status: Path = _STATUS) -> int:
    """Return the resident pages of files; 0 where nothing tells."""
    return 1024 * dict(_pairs(status)).get("RssFile", 0)


def peak_rss_bytes() -> int:
    """Return the largest resident memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes(ranges: Iterable[tuple[int, int]]) -> int:
    """Return how much of address ranges of this process is resident.

    Args:
        ranges: first address and one past the last, apart from each other. Where the system does
            not tell which pages are there, all of them count.
    """
    wanted = list(ranges)
    size = os.sysconf("SC_PAGE_SIZE")
    try:
        with _PAGEMAP.open("rb") as pagemap:
            return sum(_resident(pagemap.fileno(), start, end, size) for start, end in wanted)
    except OSError:
        return sum(end - start for start, end in wanted)


def _resident(descriptor: int, start: int, end: int, size: int) -> int:
    """Count the bytes of one range on pages that are present."""
    found = 0
    for first in range(start // size, -(-end // size), _PAGES_AT_ONCE):
        count = min(-(-end // size) - first, _PAGES_AT_ONCE)
        raw = os.pread(descriptor, count * _ENTRY_BYTES, first * _ENTRY_BYTES)
        entries = np.frombuffer(raw, dtype=np.uint64)
        is_present = (entries & _PRESENT) != 0
        begins = np.maximum((first + np.arange(len(entries))) * size, start)
        ends = np.minimum((first + 1 + np.arange(len(entries))) * size, end)
        found += int((ends - begins)[is_present].sum())
    return found


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None where there is none, as for a limit of `max`."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _pairs(path: Path) -> list[tuple[str, int]]:
    """Return the lines `name number` or `name: number kB` of a file; nothing where it is not."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    words = [line.replace(":", " ").split() for line in lines]
    return [(w[0], int(w[1])) for w in words if len(w) > 1 and w[1].isdigit()]
