"""What a result was measured on: one line for the head of a file."""

from __future__ import annotations

import datetime as dt
import os
import platform
from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")


def machine_line(device: torch.device) -> str:
    """Return the processor, its cores, torch's threads and version, the device and the time."""
    fields = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "utc": dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%MZ"),
    }
    return "; ".join(f"{name}={value}" for name, value in fields.items())


def cpu_name() -> str:
    """Return the processor's name, with the fastest instructions torch may use."""
    name = platform.processor() or platform.machine()
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def _triton_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"
