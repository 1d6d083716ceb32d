"""Times, memory and the machine they were measured on. Knows nothing of adapters."""

from __future__ import annotations

import os
import platform
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5), clear_refs


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured quantity."""

    case: str
    """What was measured."""
    unit: str
    """ms, s, ratio."""
    p20: float
    """The fifth that ran best; the figure to read on a shared machine."""
    p50: float
    """Median."""
    p80: float
    """The fifth that ran worst begins here."""
    repeats: int
    """Measurements."""
    goal: float | None
    """Upper bound for the case, in its unit; None where there is none."""
    config: str
    """Sizes."""
    cpu: str
    """Model of the processor."""
    num_cores: int
    """Cores the process may use."""
    load: float
    """Load of the machine over the last minute: what else it was doing."""
    torch: str
    """Version of torch."""
    python: str
    """Version of Python."""
    time: str
    """When, UTC."""


def build_row(
    case: str, unit: str, values: Sequence[float], *, config: str, goal: float | None = None
) -> Row:
    """Return the row of some measurements."""
    ordered = sorted(values)
    p20, p50, p80 = (ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.5, 0.8))
    return Row(
        case=case,
        unit=unit,
        p20=p20,
        p50=p50,
        p80=p80,
        repeats=len(ordered),
        goal=goal,
        config=config,
        cpu=_cpu(),
        num_cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        torch=torch.__version__,
        python=platform.python_version(),
        time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def measure_ms(run: Callable[[], object], *, repeats: int) -> list[float]:
    """Return the milliseconds of each run, after one that does not count.

    What a run returns lives until its time was taken, and is dropped before the next one.
    """
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        times.append((time.perf_counter() - start) * 1000)
        del result
    return times


def peak_extra_bytes(run: Callable[[], object]) -> int:
    """Return by how much the process's resident memory rose above where it began, at its highest.

    Linux only. The process should do nothing else.
    """
    _CLEAR.write_text(_RESET_PEAK)
    before = _status_bytes("VmRSS")
    result = run()
    peak = _status_bytes("VmHWM")
    del result
    return peak - before


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert found is not None, f"{_STATUS} has no {field}"
    return int(found[1]) * 1024


def _cpu() -> str:
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()
