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
    cpu_p20: float | None
    """As `p20`, of the processor time alone, which others' work disturbs less; None where it is no
    time."""
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
    case: str,
    unit: str,
    values: Sequence[float],
    *,
    config: str,
    cpu: Sequence[float] = (),
    goal: float | None = None,
) -> Row:
    """Return the row of some measurements.

    Args:
        case: what was measured.
        unit: of the values.
        values: one each.
        config: sizes.
        cpu: processor time of each, in the same unit.
        goal: upper bound for the case.
    """
    p20, p50, p80 = (_quantile(values, share) for share in (0.2, 0.5, 0.8))
    return Row(
        case=case,
        unit=unit,
        p20=p20,
        p50=p50,
        p80=p80,
        cpu_p20=_quantile(cpu, 0.2) if cpu else None,
        repeats=len(values),
        goal=goal,
        config=config,
        cpu=_cpu(),
        num_cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        torch=torch.__version__,
        python=platform.python_version(),
        time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


def measure_ms(run: Callable[[], object], *, repeats: int) -> tuple[list[float], list[float]]:
    """Return milliseconds and milliseconds of processor time, after one run that does not count.

    What a run returns lives until its time was taken, and is dropped before the next one.
    """
    run()
    times, cpu = [], []
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        result = run()
        times.append((time.perf_counter() - start) * 1000)
        cpu.append((time.process_time() - cpu_start) * 1000)
        del result
    return times, cpu


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
