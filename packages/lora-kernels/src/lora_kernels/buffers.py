"""RoutingBuffers: a routing at fixed addresses, as captured CUDA graphs need it.

Letters: `T` tokens, `E` entries, `N` slots, `M` tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch

from lora_kernels.errors import KernelArgumentError
from lora_kernels.routing import Routing
from lora_kernels.tables import LARGE_TILE, ROW_TILE, SMALL_TILE, KernelTables
from lora_kernels.transfer import offsets_of, pack, view_packed

if TYPE_CHECKING:
    from torch import Tensor

TILES = (ROW_TILE, SMALL_TILE, LARGE_TILE)


class RoutingBuffers:
    """Device memory for the routing of any step up to a size, written by one copy a step.

    Capture a graph with `view(...)`, whose shapes are the limits; before each replay call
    `copy_from` with the step's own routing, built on the CPU. What the step does not use is
    padding that no kernel follows, so that a step of base tokens replays the same graph.

    One object may serve graphs of several sizes: a view of fewer tokens has the same addresses.
    """

    def __init__(
        self, packed: Tensor, host: KernelTables, *, num_tokens: int, num_slots: int
    ) -> None:
        """Wrap a buffer; callers use `allocate`.

        Args:
            packed: `uint8`, as large as the tables packed together.
            host: tables of the largest shapes, all padding, on the CPU.
            num_tokens: tokens at most.
            num_slots: slots of the stacked weights.
        """
        self._packed = packed
        self._padding = host
        self._num_tokens = num_tokens
        self._num_slots = num_slots
        offsets, _ = offsets_of(host.tensors())
        self.tables = KernelTables.of(view_packed(packed, offsets, host.tensors()))
        self.clear()

    @classmethod
    def allocate(
        cls, *, num_tokens: int, max_entries: int, num_slots: int, device: torch.device | str
    ) -> Self:
        """Allocate for steps of up to so many tokens and entries.

        Args:
            num_tokens: tokens of the largest step.
            max_entries: entries of the largest step; `num_tokens` unless tokens have weighted
                sets. A step with more must run without a graph.
            num_slots: slots of the stacked weights.
            device: where the operators run.

        Raises:
            KernelArgumentError: a size is not positive.
        """
        if min(num_tokens, max_entries, num_slots) < 1:
            raise KernelArgumentError(
                f"routing buffers: num_tokens={num_tokens}, max_entries={max_entries}, "
                f"num_slots={num_slots}, expected positive sizes"
            )
        max_rows = min(num_tokens, max_entries)
        host = KernelTables(
            entry_tokens=_zeros(max_entries),
            entry_slots=_zeros(max_entries) - 1,
            scales=torch.zeros(max_entries),
            row_tokens=_zeros(max_rows),
            row_indptr=_zeros(max_rows + 1),
            row_entries=_zeros(max_entries),
            # Each segment ends in at most one tile that is not full; each group of rows likewise,
            # and weighted sets may differ from row to row.
            entry_tiles_16=_zeros(_max_tiles(max_entries, num_slots, SMALL_TILE), 2),
            entry_tiles_64=_zeros(_max_tiles(max_entries, num_slots, LARGE_TILE), 2),
            row_tiles_16=_zeros(max_rows, 2),
            row_tiles_64=_zeros(max_rows, 2),
        )
        _, size = offsets_of(host.tensors())
        packed = torch.zeros(size, dtype=torch.uint8, device=device)
        return cls(packed, host, num_tokens=num_tokens, num_slots=num_slots)

    def fits(self, routing: Routing, *, into: Routing) -> bool:
        """Return whether `copy_from` would take this routing."""
        return (
            routing.num_slots == into.num_slots
            and routing.num_tokens <= into.num_tokens
            and routing.num_entries <= into.num_entries
        )

    def copy_from(self, routing: Routing, *, into: Routing) -> None:
        """Replace the content by a step's routing: one copy, without synchronisation.

        Kernels launched before, on the same stream, still see the old content.

        Args:
            routing: built on the CPU.
            into: what the graph that comes next was captured with. Its limits count: entries
                beyond them would be cut off without a word.

        Raises:
            KernelArgumentError: the routing does not fit, or is not on the CPU. The content is
                unchanged then.
        """
        if routing.is_padded or routing.device.type != "cpu" or not self.fits(routing, into=into):
            raise KernelArgumentError(
                f"routing buffers: found {routing!r}, expected one on the CPU for "
                f"{into.num_slots} slots with at most {into.num_tokens} tokens and "
                f"{into.num_entries} entries"
            )
        self._send(routing.tables)

    def clear(self) -> None:
        """Make all of it padding: a step of base tokens."""
        self._send(None)

    def view(
        self, *, num_tokens: int, max_entries: int | None = None, tile: int = ROW_TILE
    ) -> Routing:
        """Return the routing to capture a graph with; only `Backend.TRITON` takes it.

        Args:
            num_tokens: rows of the activations in the graph.
            max_entries: entries that a step replayed with it may have; `num_tokens` if left out.
                Grids have this size.
            tile: entries a program takes: 1 for decode (BGMV), 16 or 64 for longer segments.

        Raises:
            KernelArgumentError: a size exceeds the buffers, or there is no such tile.
        """
        entries = num_tokens if max_entries is None else max_entries
        most = self.tables.entry_slots.shape[0]
        if not (0 < num_tokens <= self._num_tokens and 0 < entries <= most and tile in TILES):
            raise KernelArgumentError(
                f"routing buffers: num_tokens={num_tokens}, max_entries={entries}, tile={tile}, "
                f"expected 1..{self._num_tokens}, 1..{most} and one of {list(TILES)}"
            )
        tables = self._narrow(num_tokens, entries)
        nothing = torch.zeros(1, dtype=torch.int64, device=self._packed.device)
        return Routing(
            token_idx=tables.entry_tokens,
            scales=tables.scales,
            seg_indptr=nothing,
            seg_slots=nothing[:0],
            token_extent=self._packed.new_empty((num_tokens, 0)),
            num_tokens=num_tokens,
            num_slots=self._num_slots,
            segments=(),
            has_unit_scales=False,
            has_repeated_tokens=True,
            mixed_slots=frozenset(),
            tile=tile,
            device_tables=tables,
            is_padded=True,
        )

    def _narrow(self, num_tokens: int, entries: int) -> KernelTables:
        tables, rows = self.tables, min(num_tokens, entries)
        return KernelTables(
            entry_tokens=tables.entry_tokens[:entries],
            entry_slots=tables.entry_slots[:entries],
            scales=tables.scales[:entries],
            row_tokens=tables.row_tokens[:rows],
            row_indptr=tables.row_indptr[: rows + 1],
            row_entries=tables.row_entries[:entries],
            entry_tiles_16=tables.entry_tiles_16[
                : _max_tiles(entries, self._num_slots, SMALL_TILE)
            ],
            entry_tiles_64=tables.entry_tiles_64[
                : _max_tiles(entries, self._num_slots, LARGE_TILE)
            ],
            row_tiles_16=tables.row_tiles_16[:rows],
            row_tiles_64=tables.row_tiles_64[:rows],
        )

    def _send(self, tables: KernelTables | None) -> None:
        padding = self._padding.tensors()
        packed = pack(padding, pin=self._packed.device.type == "cuda")
        if tables is not None:
            parts = view_packed(packed, offsets_of(padding)[0], padding)
            for part, tensor in zip(parts, tables.tensors(), strict=True):
                part[: tensor.shape[0]].copy_(tensor)
            # Rows beyond the last have no entry: bounds stay where the last row ends.
            KernelTables.of(parts).row_indptr[tables.row_indptr.shape[0] :] = tables.row_indptr[-1]
        self._packed.copy_(packed, non_blocking=True)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _max_tiles(entries: int, num_slots: int, tile: int) -> int:
    """Return how many tiles so many entries can need, each of at most `num_slots` runs apart."""
    return min(entries, -(-entries // tile) + num_slots)
