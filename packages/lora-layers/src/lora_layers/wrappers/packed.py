"""Packed modules: several linear siblings that run as one matrix product.

The members keep their places and stay callable. The first one called with an input computes the
fused product; the others take their slices of it.

Letters: `T` rows, `I` in, `O_p` out of slice `p`, `P` slices.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lora_layers.wrappers.base import LoraModule, SlotStack
from lora_layers.wrappers.base_linear import make_product, prepack_product
from lora_layers.wrappers.linear import add_delta_

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class PackedGroup:
    """The fused weight of the members, their slots, and the slices not yet taken.

    A result is kept only for calls with the very same tensor object, unchanged since, and only
    until each member has taken its slice, another input comes, or a routing is set. The input is
    held as long, so that its identity cannot pass to another tensor.

    Under `torch.inference_mode` tensors carry no version: there an input must not be written in
    place between the members' calls.
    """

    def __init__(
        self,
        members: Sequence[nn.Linear],
        stack: SlotStack,
        *,
        prepack: bool = False,
        native: bool = False,
    ) -> None:
        """Fuse the members: their parameters become views of one weight `[sum O_p, I]`.

        Args:
            members: plain linear modules of one input width, dtype and device.
            stack: slots with one slice a member.
            prepack: use a prepacked product where it pays.
            native: let it be the native kernels' where they have one.
        """
        self.stack = stack
        self._members = tuple(members)
        self._sizes = [member.out_features for member in members]
        self._all = (1 << len(members)) - 1
        self._left = 0
        self._input: Tensor | None = None
        self._version = 0
        self._slices: tuple[Tensor, ...] = ()
        self.weight = _fuse_weights(self._members)
        self.bias = _fuse_biases(self._members)
        packed = prepack_product(self.weight, self.bias, native=native) if prepack else None
        self._product = packed or make_product(self.weight, self.bias)

    def slice_for(self, index: int, x: Tensor) -> Tensor:
        """Return member `index`'s output for `x [..., I]`: a view, rows strided."""
        bit = 1 << index
        if x is not self._input or not self._left & bit or _version(x) != self._version:
            self._compute(x)
        result = self._slices[index]
        self._left &= ~bit
        if not self._left:
            self.drop()
        return result

    def parts_of(
        self, modules: Sequence[nn.Module]
    ) -> tuple[Callable[[Tensor], Tensor], SlotStack] | None:
        """Return product and slots if `modules` stand in for all members, in order; else None."""
        places = [(m.group, m.index) for m in modules if isinstance(m, PackedMember)]
        if places != [(self, index) for index in range(len(self._members))]:
            return None
        return self._product, self.stack

    def drop(self) -> None:
        """Forget the input and the slices that nobody took."""
        self._input = None
        self._slices = ()
        self._left = 0
        self.stack.cell.keepers.discard(self)

    def _compute(self, x: Tensor) -> None:
        self.drop()  # an error below must leave nothing behind
        y = self._product(x)
        stack = self.stack
        routing = stack.cell.active
        if routing is not None and not stack.is_idle:
            add_delta_(y, x, stack, routing)
        self._slices = torch.split(y, self._sizes, dim=-1)
        self._input, self._version, self._left = x, _version(x), self._all
        stack.cell.keepers.add(self)

    def unfuse(self) -> None:
        """Give each member's parameters a storage of their own again, with the same values."""
        self.drop()
        for member in self._members:
            for parameter in (member.weight, member.bias):
                if parameter is not None:
                    parameter.data = parameter.data.clone()


class PackedMember(LoraModule):
    """Stands in for one member: hands out its slice of the group's product."""

    group: PackedGroup
    index: int

    def __init__(self, base_layer: nn.Module, group: PackedGroup, index: int) -> None:
        """Take the place of `base_layer`, member `index` of `group`."""
        super().__init__(base_layer)
        object.__setattr__(self, "group", group)
        object.__setattr__(self, "index", index)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., I]` to `[..., O_p]`."""
        return self.group.slice_for(self.index, x)


def why_not_packable(members: Sequence[nn.Linear]) -> str | None:
    """Return why these modules cannot run as one product; None if they can."""
    for name, values in (
        ("in_features", [member.in_features for member in members]),
        ("dtypes", [str(p.dtype) for member in members for p in member.parameters()]),
        ("devices", [str(member.weight.device) for member in members]),
    ):
        if len(set(values)) > 1:
            return f"members have different {name}: {values}"
    if len({id(member.weight) for member in members}) < len(members):
        return "members share a weight"
    return None


def _version(x: Tensor) -> int:
    """Return how often `x` was written in place; inference tensors do not count."""
    return 0 if x.is_inference() else x._version  # noqa: SLF001


def _fuse_weights(members: Sequence[nn.Linear]) -> Tensor:
    """Return the members' weights as one, of which they become views."""
    fused = torch.cat([member.weight.data for member in members])
    widths = [member.out_features for member in members]
    for member, rows in zip(members, torch.split(fused, widths), strict=True):
        member.weight.data = rows  # the Parameter object stays, and with it every tie to it
    return fused


def _fuse_biases(members: Sequence[nn.Linear]) -> Tensor | None:
    """Return the members' biases as one, zero where a member has none; None if none has one."""
    if all(member.bias is None for member in members):
        return None
    weight = members[0].weight
    fused = torch.zeros(
        sum(m.out_features for m in members), dtype=weight.dtype, device=weight.device
    )
    bounds = pairwise(accumulate((m.out_features for m in members), initial=0))
    for member, (start, end) in zip(members, bounds, strict=True):
        if member.bias is not None:
            fused[start:end] = member.bias.data
            member.bias.data = fused[start:end]
    return fused
