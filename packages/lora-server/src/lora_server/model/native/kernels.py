"""The compiled functions of `layers.cpp`, by dtype, with their argument types."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lora_kernels.native import load_library

if TYPE_CHECKING:
    from collections.abc import Callable

_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "decode": [_POINTER, _POINTER, _POINTER, _POINTER, _FLOAT],
    "prefill": [_POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER, _FLOAT],
    "write": [_POINTER, _POINTER, _POINTER, _POINTER],
    "rms_norm": [_POINTER, _SIZE, _POINTER, _FLOAT, _POINTER, _SIZE, _SIZE],
    "silu_multiply": [_POINTER, _SIZE, _POINTER, _SIZE, _POINTER, _SIZE, _SIZE],
    "rotate": [_POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE],
    "find_largest": [_POINTER, _SIZE, _SIZE, _SIZE, _POINTER],
}

_NAMES = {torch.float32: "float", torch.bfloat16: "bf16"}

LANES = 16
"""Numbers a register holds; head widths are multiples of it."""


class LayerKernels:
    """The functions for one dtype. Addresses are passed as integers."""

    __slots__ = (
        "decode",
        "dtype",
        "find_largest",
        "prefill",
        "rms_norm",
        "rotate",
        "silu_multiply",
        "write",
    )

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        """Take the functions for float32 or bfloat16."""
        name = _NAMES[dtype]
        self.dtype = dtype
        self.decode = _declare(library, "decode", name)
        self.prefill = _declare(library, "prefill", name)
        self.write = _declare(library, "write", name)
        self.rms_norm = _declare(library, "rms_norm", name)
        self.silu_multiply = _declare(library, "silu_multiply", name)
        self.rotate = _declare(library, "rotate", name)
        self.find_largest = _declare(library, "find_largest", name, ctypes.c_int)


def load_layer_kernels(dtype: torch.dtype) -> LayerKernels | None:
    """Load the kernels; compiles them unless that was done before on this machine.

    Returns:
        None for other dtypes than float32 and bfloat16.

    Raises:
        BackendUnavailableError: they cannot be compiled or run here.
    """
    if dtype not in _NAMES:
        return None
    return LayerKernels(load_library([Path(__file__).parent / "layers.cpp"]), dtype)


def _declare(library: ctypes.CDLL, name: str, dtype: str, result: Any = None) -> Callable[..., Any]:
    function: Any = getattr(library, f"{name}_{dtype}")
    function.argtypes = _ARGUMENTS[name]
    function.restype = result
    declared: Callable[..., Any] = function
    return declared
