"""The native kernels: whether they run here, and the parts of them that are useful alone.

They are C++ for Linux on x86-64 with AVX-512 (bfloat16 products included), compiled in seconds by
the machine's own compiler at the first use and kept in `~/.cache/lora-kernels`. Nothing needs
them: the backend aten computes the same.
"""

from __future__ import annotations

from lora_kernels._native.compiler import default_cache_dir, headers_dir, load_library
from lora_kernels._native.kernels import native_kernels
from lora_kernels._native.linear import lora_addresses, step_address
from lora_kernels._native.product import PackedProduct
from lora_kernels.errors import BackendUnavailableError

__all__ = [
    "PackedProduct",
    "default_cache_dir",
    "headers_dir",
    "load_library",
    "lora_addresses",
    "step_address",
    "why_not_native",
]


def why_not_native() -> str | None:
    """Compile and load the kernels unless that was done; return why they cannot be used, or None.

    Takes seconds the first time on a machine.
    """
    try:
        native_kernels()
    except BackendUnavailableError as error:
        return str(error)
    return None
