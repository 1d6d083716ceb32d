"""The compiled functions of this package, with their argument types."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lora_kernels._native.compiler import load_library
from lora_kernels._native.memory import WeightMemory

if TYPE_CHECKING:
    from collections.abc import Callable

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_APPLY = [_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE]
_RUN = [_POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER]
_LARGEST = [_POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER]
_PACK = [_POINTER, _SIZE, _SIZE, _SIZE, _POINTER]
_ADVISE = [_POINTER, _SIZE]


class NativeKernels:
    """The functions of `lora.cpp` and `product.cpp`. Addresses are passed as integers."""

    __slots__ = (
        "apply_lora",
        "find_largest",
        "has_product",
        "pack_product",
        "run_product",
        "weight_memory",
    )

    def __init__(self, library: ctypes.CDLL) -> None:
        self.apply_lora: dict[torch.dtype, Callable[..., None]] = {
            torch.float32: _declare(library.lora_apply_float, _APPLY),
            torch.bfloat16: _declare(library.lora_apply_bf16, _APPLY),
        }
        self.pack_product = _declare(library.product_pack, _PACK)
        self.run_product = _declare(library.product_run, _RUN)
        self.find_largest = _declare(library.product_largest, _LARGEST, ctypes.c_int)
        self.weight_memory = WeightMemory(_declare(library.product_advise, _ADVISE))
        """Where packed weights lie."""
        self.has_product = bool(library.product_is_available())
        """Whether the processor has tiles for bfloat16, and the system lets us use them."""


@lru_cache(maxsize=1)
def native_kernels() -> NativeKernels:
    """Compile and load the kernels at the first call.

    Raises:
        BackendUnavailableError: they cannot be compiled or run here.
    """
    folder = Path(__file__).parent
    return NativeKernels(load_library([folder / "lora.cpp", folder / "product.cpp"]))


def _declare(function: Any, arguments: list[Any], result: Any = None) -> Callable[..., Any]:
    function.argtypes = arguments
    function.restype = result
    declared: Callable[..., Any] = function
    return declared
