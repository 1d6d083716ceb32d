"""What every launch needs: where kernels can run, and what the dtypes ask of the products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from lora_kernels._triton.shrink import sgmv_shrink_kernel
from lora_kernels.errors import BackendUnavailableError

if TYPE_CHECKING:
    from torch import Tensor

    from lora_kernels.tiling import Tile

TL_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


IS_INTERPRETED = isinstance(sgmv_shrink_kernel, InterpretedFunction)
"""Triton decides this once, when it is imported."""


def launch_options(tile: Tile) -> dict[str, Any]:
    """Return the options of a launch; a multiplication and an addition may round once together."""
    return {
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,
    }


def check_device(op: str, tensor: Tensor) -> None:
    """Check that kernels can run where the tensor is.

    Raises:
        BackendUnavailableError: the tensor is on the CPU and Triton compiles its kernels.
    """
    if not tensor.is_cuda and not IS_INTERPRETED:
        raise BackendUnavailableError(
            f"{op}: backend triton found tensors on {tensor.device}, expected cuda; on a CPU it "
            "runs only in Triton's interpreter, for tests: TRITON_INTERPRET=1 before triton is "
            "imported"
        )


def has_tf32(device: torch.device) -> bool:
    """Return whether products can use TF32: from NVIDIA's Ampere on, and in the interpreter."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def shrink_precision(x: Tensor, a: Tensor) -> tuple[tl.dtype, str]:
    """Return the dtype of the factors of shrink's products, and Triton's word for their precision.

    Two 16-bit dtypes that differ meet in TF32, which holds both exactly; float32 stays float32.
    """
    if x.dtype == a.dtype and not (IS_INTERPRETED and x.dtype == torch.bfloat16):
        return TL_DTYPES[x.dtype], "ieee"
    # The interpreter multiplies bfloat16 as the integers it keeps it in; float32 holds it exactly.
    is_short = torch.float32 not in {x.dtype, a.dtype}
    return tl.float32, "tf32" if is_short and has_tf32(x.device) else "ieee"
