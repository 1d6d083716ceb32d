"""`x W^T + bias` in bfloat16 over a weight that was packed once, with AMX tiles.

Letters: `T` rows, `I` in, `O` out.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch

from lora_kernels._native.kernels import native_kernels
from lora_kernels.errors import BackendUnavailableError, UnsupportedShapeError

if TYPE_CHECKING:
    from torch import Tensor

IN_MULTIPLE, OUT_MULTIPLE = 32, 16


class PackedProduct:
    """A linear module's product, for any number of rows. Sums are in float32.

    The order of every sum depends on `I` alone, so that a row's result does not depend on the
    number of rows or on its neighbours.
    """

    __slots__ = (
        "_bias",
        "_find_largest",
        "_packed",
        "_piece",
        "_run",
        "in_features",
        "out_features",
    )

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Pack a copy of a weight.

        Args:
            weight: `[O, I]` bfloat16 on the CPU; not read any more afterwards.
            bias: `[O]` or None.

        Raises:
            UnsupportedShapeError: `I` is no multiple of 32, `O` none of 16, or the dtype or the
                device is another one.
            BackendUnavailableError: there are no kernels here, or no tiles for them.
        """
        self.out_features, self.in_features = weight.shape
        is_regular = self.in_features % IN_MULTIPLE == 0 and self.out_features % OUT_MULTIPLE == 0
        if weight.dtype is not torch.bfloat16 or weight.device.type != "cpu" or not is_regular:
            raise UnsupportedShapeError(
                f"packed product: weight is {[*weight.shape]} {weight.dtype} on {weight.device}, "
                f"expected bfloat16 on cpu, multiples of {OUT_MULTIPLE} and {IN_MULTIPLE}"
            )
        kernels = native_kernels()
        if not kernels.has_product:
            raise BackendUnavailableError("packed product: no AMX tiles for bfloat16 here")
        self._run = kernels.run_product
        self._find_largest = kernels.find_largest
        memory, self._piece = kernels.weight_memory.allocate(weight.nbytes)
        self._packed = memory.view(torch.bfloat16)
        self._bias = None if bias is None else bias.detach().float().contiguous()
        rows = weight.detach()
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        sizes = rows.stride(0), self.out_features, self.in_features
        kernels.pack_product(rows.data_ptr(), *sizes, self._packed.data_ptr())

    @property
    def addresses(self) -> tuple[int, int]:
        """Where `product::Packed` finds its weight and its bias, 0 for none; for other kernels."""
        return self._packed.data_ptr(), 0 if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[..., I]` bfloat16 to `[..., O]`.

        Raises:
            UnsupportedShapeError: `x` has another width, dtype or device.
        """
        rows = self._rows_of(x)
        y = torch.empty((*x.shape[:-1], self.out_features), dtype=torch.bfloat16)
        self._run(
            self._packed.data_ptr(),
            rows.data_ptr(),
            rows.stride(0),
            y.data_ptr(),
            self.out_features,
            rows.shape[0],
            self.out_features,
            self.in_features,
            None if self._bias is None else self._bias.data_ptr(),
        )
        return y

    def largest(self, x: Tensor) -> tuple[list[int], bool]:
        """Return the place of each row's largest output, without writing the outputs.

        Args:
            x: `[T, I]` bfloat16.

        Returns:
            The first place of the largest of each row, `T` numbers, as it would be among the
            rounded outputs; and whether all of these are numbers and the largest ones finite. The
            places mean nothing where they are not.

        Raises:
            UnsupportedShapeError: `x` has another width, dtype or device.
        """
        rows = self._rows_of(x)
        places = array("q", bytes(8 * rows.shape[0]))
        are_finite = self._find_largest(
            self._packed.data_ptr(),
            rows.data_ptr(),
            rows.stride(0),
            rows.shape[0],
            self.out_features,
            self.in_features,
            None if self._bias is None else self._bias.data_ptr(),
            places.buffer_info()[0],
        )
        return places.tolist(), bool(are_finite)

    def _rows_of(self, x: Tensor) -> Tensor:
        is_right = x.shape[-1] == self.in_features and x.dtype is torch.bfloat16
        if not is_right or x.device.type != "cpu":
            raise UnsupportedShapeError(
                f"packed product: x is {[*x.shape]} {x.dtype} on {x.device}, "
                f"expected [..., {self.in_features}] bfloat16 on cpu"
            )
        rows = x.reshape(-1, self.in_features)
        return rows if rows.stride(1) == 1 else rows.contiguous()
