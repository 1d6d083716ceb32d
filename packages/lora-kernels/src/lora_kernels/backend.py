"""Which implementation an operator runs: chosen by an argument, never by the environment."""

from __future__ import annotations

from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import torch


class Backend(StrEnum):
    """The implementations of every operator.

    All of them take the same arguments and agree within the tolerances of `lora_kernels.testing`.
    """

    REFERENCE = "reference"
    """Plain loops over entries in float32, on any device: the specification."""

    ATEN = "aten"
    """Matrix products of torch, arranged for CPUs; needs no compiler. Runs on any device."""

    NATIVE = "native"
    """C++ for CPUs with AVX-512, compiled at the first use (`lora_kernels.native`): `apply_lora_`
    of float32 and bfloat16. Whatever the kernels do not take runs as `ATEN`."""

    TRITON = "triton"
    """Kernels for CUDA and ROCm, from the extra `triton`; also in Triton's interpreter."""

    @classmethod
    def for_device(cls, device: torch.device) -> Self:
        """Return the fastest backend that can run on a device, as far as it is installed."""
        has_kernels = device.type == "cuda" and find_spec("triton") is not None
        return cls(cls.TRITON if has_kernels else cls.ATEN)
