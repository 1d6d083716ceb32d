"""DecoderStack: decoder layers of Llama's form as native kernels, in bfloat16 on CPUs with AMX.

What a step needs beyond it (weighted sets of adapters, gains, weights of an adapter's own) goes
through the layers' own forward, whose parts have fast forms of their own.

Letters: `T` rows, `D` hidden width, `W` head width.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from lora_kernels import Routing
from lora_kernels.native import step_address

from .decoder_parts import PackedFields, packed_fields
from .decoder_step import StepTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lora_layers.step import NoRouting, RoutingCell
    from lora_server.model.attention import PagedAttention
    from lora_server.model.kv_cache import KvCache

    from .decoder_parts import LayerParts

_NORMS = ("input", "inner", "query", "key")


class _Layer(ctypes.Structure):
    """`Layer` of decoder_layer.h."""

    _fields_ = (
        ("projections", PackedFields * 4),
        ("slots", ctypes.c_void_p * 4),
        ("store", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in _NORMS),
        *((name, ctypes.c_int64) for name in ("heads", "key_heads", "width", "block", "window")),
        *((f"{name}_epsilon", ctypes.c_float) for name in _NORMS),
        ("scaling", ctypes.c_float),
    )


class _Slots(NamedTuple):
    """What all projections say of the slots of a routing."""

    are_possible: list[bool]
    """For each layer, whether the kernel can add what they do."""
    are_read: bool
    """Whether any projection has something of theirs."""
    fields: bytes
    """The layers with the addresses of their slots."""


_MAX_KNOWN = 64
"""Sets of slots whose addresses are kept."""


class DecoderStack:
    """The layers of one model that have the form, in order, as the kernel reads them."""

    def __init__(
        self,
        layers: Sequence[LayerParts],
        cell: RoutingCell,
        attention: PagedAttention,
        run: Callable[..., None],
    ) -> None:
        """Take the layers; their parts must stay what and where they are.

        Args:
            layers: at least one.
            cell: where all their projections read the step's routing.
            attention: the model's, with its store and the step.
            run: `decoder_layers` of decoder.cpp.
        """
        self.hidden_width = layers[0].projections[0].product.in_features
        """`D`."""
        self.head_width = layers[0].head_width
        """`W`."""
        self.num_calls = 0
        """Calls of a kernel."""
        self._layers = tuple(layers)
        self._cell = cell
        self._attention = attention
        self._run = run
        self._fields = (_Layer * len(layers))()
        self._addresses = [ctypes.addressof(fields) for fields in self._fields]
        self._step = StepTable()
        # What the fields were filled for.
        self._cache: KvCache | None = None
        self._routing: Routing | NoRouting | None = None
        self._num_writes = -1
        self._known: dict[object, _Slots] = {}
        """What was found for the slots of earlier routings, until one of them is written."""
        self._are_possible: list[bool] = []
        self._routing_address = 0

    def __len__(self) -> int:
        """Count the layers."""
        return len(self._layers)

    def run(
        self,
        index: int,
        hidden_states: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor | None:
        """Run one layer.

        Args:
            index: of the layer.
            hidden_states: `[1, T, D]` bfloat16.
            angles: cosines and sines of the rotary embedding.

        Returns:
            `[1, T, D]`; None for what the kernel does not take.
        """
        num_rows = hidden_states.shape[1]
        if hidden_states.shape != (1, num_rows, self.hidden_width):
            return None
        addresses = self.addresses(num_rows, angles, index=index)
        if addresses is None:
            return None
        states = hidden_states.contiguous()
        out = torch.empty_like(states)
        layer, table = addresses
        self._run(layer, 1, table, states.data_ptr(), out.data_ptr())
        self.num_calls += 1
        return out

    def addresses(
        self,
        num_rows: int,
        angles: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        index: int | None = None,
    ) -> tuple[int, int] | None:
        """Return where the kernels find the layers and the step, until the next one.

        Args:
            num_rows: `T`.
            angles: cosines and sines of the rotary embedding; None where the kernel has its own.
            index: the layer that will run; None for all of them.

        Returns:
            Addresses of the (first) layer and of the step; None for a step that the kernels do not
            take.
        """
        cache, step = self._attention.cache, self._attention.step
        if cache is None or step is None:
            return None
        if cache is not self._cache:
            self._fill(cache)
        if self._cell.active is not self._routing or self._cell.num_writes != self._num_writes:
            self._find_slots(num_rows)
        is_possible = all(self._are_possible) if index is None else self._are_possible[index]
        if not is_possible:
            return None
        table = self._step.address(
            step, num_rows, angles, width=self.head_width, routing=self._routing_address
        )
        return None if table is None else (self._addresses[index or 0], table)

    def _fill(self, cache: KvCache) -> None:
        for fields, parts in zip(self._fields, self._layers, strict=True):
            options = self._attention.options[parts.layer_idx]
            fields.projections = (PackedFields * 4)(*map(packed_fields, parts.projections))
            fields.store = cache.layers[parts.layer_idx].data_ptr()
            fields.heads = parts.projections[1].product.in_features // parts.head_width
            fields.key_heads = self._attention.seen[parts.layer_idx].num_kv_heads
            fields.width, fields.block = parts.head_width, cache.block_size
            fields.window, fields.scaling = options.window or 0, options.scaling
            for name, norm in zip(_NORMS, parts.norms, strict=True):
                if norm is not None:
                    setattr(fields, name, cast("torch.Tensor", norm.weight).data_ptr())
                    setattr(fields, f"{name}_epsilon", norm.variance_epsilon)
        self._cache = cache
        self._num_writes = -1

    def _find_slots(self, num_rows: int) -> None:
        """Find out what the step's adapters add to each projection."""
        routing, num_writes = self._cell.active, self._cell.num_writes
        if num_writes != self._num_writes or len(self._known) == _MAX_KNOWN:
            self._known.clear()
        key = _kind_of(routing, num_rows)
        if key not in self._known:
            self._known[key] = self._ask(num_rows)
        found = self._known[key]
        ctypes.memmove(self._fields, found.fields, len(found.fields))
        self._are_possible = found.are_possible
        is_read = found.are_read and isinstance(routing, Routing)
        self._routing_address = step_address(cast("Routing", routing)) if is_read else 0
        self._routing, self._num_writes = routing, num_writes

    def _ask(self, num_rows: int) -> _Slots:
        """Ask each projection what the step's adapters add to it."""
        are_possible, are_read = [], False
        for fields, parts in zip(self._fields, self._layers, strict=True):
            found = [part.adapter_addresses(num_rows) for part in parts.projections]
            are_possible.append(None not in found)
            for place, pair in enumerate(found):
                module = pair[0] if pair else 0
                fields.slots[place] = module or None
                are_read |= bool(module)
        return _Slots(are_possible, are_read, bytes(self._fields))


def _kind_of(routing: Routing | NoRouting | None, num_rows: int) -> object:
    """Return all of a routing that the projections' answers depend on."""
    if not isinstance(routing, Routing):
        return type(routing)
    slots = tuple(segment.slot for segment in routing.segments)
    is_plain = routing.has_repeated_tokens, routing.is_padded, routing.num_tokens == num_rows
    return slots, is_plain


@dataclass(slots=True, eq=False)
class DecoderLayer:
    """The forward of one layer of a stack, `[1, T, D]` to the same shape."""

    stack: DecoderStack
    index: int
    original: Callable[..., Any]
    """The layer's own forward, for what the kernel does not take."""

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *arguments: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Map the rows; all arguments are those of transformers' decoder layers."""
        stack = self.stack
        if position_embeddings is not None and not arguments:
            out = stack.run(self.index, hidden_states, position_embeddings)
            if out is not None:
                return out
        result: torch.Tensor = self.original(
            hidden_states, *arguments, position_embeddings=position_embeddings, **options
        )
        return result
