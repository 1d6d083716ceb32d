"""Which implementation an operator runs: chosen by an argument, never by the environment."""

from __future__ import annotations

from enum import StrEnum


class Backend(StrEnum):
    """The implementations of every operator.

    All of them take the same arguments and agree within the tolerances of `lora_kernels.testing`.
    """

    REFERENCE = "reference"
    """Plain loops over entries in float32, on any device: the specification."""

    ATEN = "aten"
    """Matrix products of torch, arranged for CPUs; needs no compiler. Runs on any device."""

    TRITON = "triton"
    """Kernels for CUDA and ROCm, from the extra `triton`; also in Triton's interpreter."""
