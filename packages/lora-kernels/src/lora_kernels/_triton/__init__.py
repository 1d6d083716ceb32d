"""Kernels in Triton: imported by the operators when the backend is asked for, never before."""

from __future__ import annotations

from lora_kernels.errors import BackendUnavailableError

try:
    import triton  # noqa: F401 - every module below needs it
except ModuleNotFoundError as missing:
    raise BackendUnavailableError(
        "backend triton: the package triton is not installed, expected lora-kernels[triton]"
    ) from missing
