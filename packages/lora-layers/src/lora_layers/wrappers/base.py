"""What all wrappers share: the base module's face, and slots that know whether they hold anything.

Letters: `T` rows, `N` slots, `I` in, `O` out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from lora_kernels import Backend, Routing, StackedWeights
from lora_layers.errors import InferenceOnlyError, RoutingNotSetError
from lora_layers.wrappers.full import FullModules

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from lora_layers.content import SlotContent
    from lora_layers.step import NoRouting, RoutingCell


class SlotStack:
    """The slots of one wrapped module, its place in the model, and the step's routing.

    Nothing is computed for a module while no slot of it holds anything: `is_idle` is read on every
    call, so it is kept as a plain attribute.
    """

    __slots__ = (
        "backend",
        "cell",
        "fulls",
        "is_idle",
        "member_paths",
        "occupied",
        "path",
        "weights",
    )

    def __init__(
        self,
        *,
        path: str,
        member_paths: Sequence[str],
        weights: StackedWeights,
        cell: RoutingCell,
        backend: Backend,
    ) -> None:
        self.path = path
        """Where the module is; for a packed one `<parent>.<packed name>`."""
        self.member_paths = tuple(member_paths)
        """Path of the module behind each slice, in slice order; `(path,)` when it is not packed."""
        self.weights = weights
        """Pairs, gains and biases of all slots."""
        self.fulls = FullModules(weights.out_features, weights.device)
        """Whole replacements of all slots."""
        self.cell = cell
        """Where the step's routing is read."""
        self.backend = backend
        """Implementation of the operators."""
        self.occupied: set[int] = set()
        """Slots that hold anything."""
        self.is_idle = True
        """No slot holds anything."""

    def write(self, slot: int, content: SlotContent) -> None:
        """Replace what `slot` holds; the slot counts as written even when this raises."""
        self.cell.num_writes += 1
        self.occupied.add(slot)
        self.is_idle = False
        self.weights.write_slot(slot, content.slices, gain=content.gain, bias=content.bias)
        self.fulls.write(slot, content.fulls)

    def reset(self, slot: int) -> None:
        """Zero `slot`; free when it holds nothing."""
        if slot in self.occupied:
            self.cell.num_writes += 1
            self.weights.reset_slot(slot)
            self.fulls.reset(slot)
            self.occupied.discard(slot)
            self.is_idle = not self.occupied

    @property
    def nbytes(self) -> int:
        """Bytes of all slots; whole replacements are held beside them."""
        return self.weights.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """Of the slots."""
        return self.weights.dtype


def check_rows(path: str, routing: Routing | NoRouting, y: Tensor, num_rows: int) -> Routing:
    """Return the routing if the delta of `num_rows` rows can be added to `y`.

    Args:
        path: the wrapped module, for messages.
        routing: what is set for this step.
        y: what the delta is added to.
        num_rows: rows the module was called with.

    Raises:
        RoutingNotSetError: it was made for another number of rows, or none is set.
        InferenceOnlyError: `y` has a gradient.
    """
    if y.requires_grad:
        raise InferenceOnlyError(module=path)
    if isinstance(routing, Routing) and routing.num_tokens == num_rows:
        return routing
    num_routed = routing.num_tokens if isinstance(routing, Routing) else None
    raise RoutingNotSetError(module=path, num_rows=num_rows, num_routed=num_routed)


class LoraModule(nn.Module):
    """Stands in for a base module: its parameters, buffers, children and attributes are the base's.

    The registries are shared, not copied, so `state_dict` keys, weight loading, `.to()` and
    parameter ties are what they were without the wrapper.
    """

    base_layer: nn.Module

    def __init__(self, base_layer: nn.Module) -> None:
        """Take the place of `base_layer`, which stays as it is."""
        super().__init__()
        # Past nn.Module.__setattr__, which would make the base a child and rename its parameters.
        object.__setattr__(self, "base_layer", base_layer)
        self._parameters = base_layer._parameters  # noqa: SLF001
        self._buffers = base_layer._buffers  # noqa: SLF001
        self._modules = base_layer._modules  # noqa: SLF001
        self._non_persistent_buffers_set = base_layer._non_persistent_buffers_set  # noqa: SLF001
        self.training = base_layer.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_layer":  # while unpickling there is none yet
                raise
            return getattr(self.base_layer, name)

    def train(self, mode: bool = True) -> LoraModule:  # noqa: FBT001, FBT002 - torch's signature
        """Switch the base module along."""
        self.base_layer.train(mode)
        super().train(mode)
        return self

    def extra_repr(self) -> str:
        """Show what is wrapped."""
        return f"base={self.base_layer}"
