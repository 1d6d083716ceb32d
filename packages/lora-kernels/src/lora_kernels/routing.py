"""Routing: which adapter slots apply to which tokens of a step, the metadata all operators read.

Knows slots and tokens by number only: nothing of adapters, requests or models.

Letters: `T` tokens of the step, `E` entries, `G` segments, `N` slots, `U` tokens with an entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch

from lora_kernels.errors import KernelArgumentError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of entries that share a slot."""

    slot: int
    """Slot in `0..N-1`."""

    start: int
    """First entry."""

    end: int
    """One past the last entry; equal to `start` in an empty segment."""

    first_token: int | None
    """Set when the tokens are `first_token, first_token + 1, ...` in the order of the entries."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """The entries (token, slot, scale) of one step, sorted by slot, then by token.

    A token without adapter has no entry, a token with a weighted set has several. Build it once a
    step with `build_routing` and share it by reference with every layer: what a backend derives
    from it is kept here, so that only the first layer pays for it (one thread at a time).

    The constructor trusts its arguments; `build_routing` and `Routing.from_segments` check theirs.
    """

    token_idx: Tensor
    """Token of each entry, `[E]` int64."""

    scales: Tensor
    """Factor of each entry, `[E]` float32."""

    seg_indptr: Tensor
    """Bounds of the segments, `[G + 1]` int64: segment `g` is `seg_indptr[g]:seg_indptr[g + 1]`."""

    seg_slots: Tensor
    """Slot of each segment, `[G]` int64, strictly growing."""

    num_tokens: int
    """`T`: rows of the activations of this step."""

    num_slots: int
    """`N`: slots of the stacked weights this routing is for."""

    segments: tuple[Segment, ...]
    """The segments again, on the host, for backends that loop over them."""

    has_unit_scales: bool
    """Every scale is exactly 1, so that multiplying by it can be left out."""

    mixed_slots: frozenset[int]
    """Slots of which some entry is scaled, or shares its token with another entry."""

    @classmethod
    def from_segments(
        cls,
        *,
        token_idx: Tensor,
        scales: Tensor,
        seg_indptr: Tensor,
        seg_slots: Tensor,
        num_tokens: int,
        num_slots: int,
        device: torch.device | str = "cpu",
    ) -> Routing:
        """Build from entries that are sorted already; segments may be empty.

        Args:
            token_idx: token of each entry, `[E]` int64, on the CPU.
            scales: factor of each entry, `[E]` float32, on the CPU.
            seg_indptr: bounds of the segments, `[G + 1]` int64, on the CPU.
            seg_slots: slot of each segment, `[G]` int64, strictly growing, on the CPU.
            num_tokens: tokens of the step.
            num_slots: slots of the stacked weights.
            device: where the operators will run; reached by one copy without synchronisation.

        Raises:
            KernelArgumentError: bounds, slots or tokens are out of range or out of order.
        """
        _check_lengths(token_idx, scales, seg_indptr, seg_slots)
        _check_segments(seg_indptr, seg_slots, token_idx.shape[0])
        _check_range("seg_slots", seg_slots, num_slots)
        _check_range("token_idx", token_idx, num_tokens)
        _check_finite(scales)
        tensors = (token_idx, seg_indptr, seg_slots, scales)
        return _assemble(tensors, num_tokens, num_slots, torch.device(device))

    @property
    def num_entries(self) -> int:
        """`E`."""
        return self.token_idx.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.token_idx.device

    @cached_property
    def is_empty(self) -> bool:
        """No token has an adapter: every operator returns at once."""
        return self.token_idx.shape[0] == 0

    @cached_property
    def entry_slots(self) -> Tensor:
        """Slot of each entry, `[E]` int64."""
        return self.seg_slots[self.entry_segments]

    @cached_property
    def entry_segments(self) -> Tensor:
        """Segment of each entry, `[E]` int64."""
        return torch.repeat_interleave(self.seg_indptr.diff())

    @cached_property
    def touched_tokens(self) -> Tensor:
        """Tokens with at least one entry, `[U]` int64, growing."""
        touched: Tensor = torch.unique(self.token_idx)
        return touched

    @cached_property
    def touched_range(self) -> tuple[int, int]:
        """First token with an entry, and the number of tokens from it to the last one."""
        first, last = int(self.touched_tokens[0]), int(self.touched_tokens[-1])
        return first, last - first + 1

    @cached_property
    def is_touched_run(self) -> bool:
        """Every token of `touched_range` has an entry, so that its rows are a view."""
        return self.touched_range[1] == self.touched_tokens.shape[0]

    @cached_property
    def has_repeated_tokens(self) -> bool:
        """Some token has several entries."""
        return self.touched_tokens.shape[0] < self.token_idx.shape[0]

    @cached_property
    def entry_rows(self) -> Tensor:
        """Position of each entry's token in `touched_tokens`, `[E]` int64."""
        return torch.searchsorted(self.touched_tokens, self.token_idx)

    @cached_property
    def derived(self) -> dict[Hashable, Any]:
        """What a backend has worked out for this routing and keeps for the next layers."""
        return {}

    def __repr__(self) -> str:
        return (
            f"Routing(num_tokens={self.num_tokens}, num_entries={self.num_entries}, "
            f"slots={[segment.slot for segment in self.segments]}, num_slots={self.num_slots}, "
            f"device='{self.device}')"
        )


def build_routing(
    *,
    token_idx: Sequence[int] | Tensor,
    slots: Sequence[int] | Tensor,
    scales: Sequence[float] | Tensor | None = None,
    num_tokens: int,
    num_slots: int,
    device: torch.device | str = "cpu",
) -> Routing:
    """Build the routing of a step from its entries, in any order.

    Args:
        token_idx: token of each entry, `[E]`, `0..num_tokens-1`; several entries may name one.
        slots: slot of each entry, `[E]`, `0..num_slots-1`.
        scales: factor of each entry, `[E]`; 1 everywhere when left out.
        num_tokens: tokens of the step.
        num_slots: slots of the stacked weights.
        device: where the operators will run; reached by one copy without synchronisation.

    Returns:
        Entries sorted by slot, then by token; entries equal in both keep the order given.

    Raises:
        KernelArgumentError: lengths differ, or a token, slot or scale is out of range.
    """
    entry_tokens = torch.as_tensor(token_idx, dtype=torch.int64, device="cpu")
    entry_slots = torch.as_tensor(slots, dtype=torch.int64, device="cpu")
    if scales is None:
        entry_scales = torch.ones(entry_tokens.shape, dtype=torch.float32)
    else:
        entry_scales = torch.as_tensor(scales, dtype=torch.float32, device="cpu")
    _check_entries(entry_tokens, entry_slots, entry_scales, num_tokens, num_slots)
    # The sort key is exact: num_slots * num_tokens stays far below 2**63.
    order = torch.argsort(entry_slots * num_tokens + entry_tokens, stable=True)
    seg_slots, counts = torch.unique_consecutive(entry_slots[order], return_counts=True)
    seg_indptr = torch.zeros(seg_slots.shape[0] + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=seg_indptr[1:])
    tensors = (entry_tokens[order], seg_indptr, seg_slots, entry_scales[order])
    return _assemble(tensors, num_tokens, num_slots, torch.device(device))


def route_tokens(
    token_slots: Sequence[int | None], *, num_slots: int, device: torch.device | str = "cpu"
) -> Routing:
    """Build the routing of a step in which every token has one adapter or none.

    Args:
        token_slots: slot of each token, `[T]`; `None` for a token of the base model.
        num_slots: slots of the stacked weights.
        device: where the operators will run.

    Raises:
        KernelArgumentError: a slot is out of range.
    """
    entries = [(token, slot) for token, slot in enumerate(token_slots) if slot is not None]
    return build_routing(
        token_idx=[token for token, _ in entries],
        slots=[slot for _, slot in entries],
        num_tokens=len(token_slots),
        num_slots=num_slots,
        device=device,
    )


def _check_entries(
    entry_tokens: Tensor, entry_slots: Tensor, entry_scales: Tensor, num_tokens: int, num_slots: int
) -> None:
    lengths = {"token_idx": entry_tokens, "slots": entry_slots, "scales": entry_scales}
    shapes = {name: list(tensor.shape) for name, tensor in lengths.items()}
    if any(shape != [entry_tokens.numel()] for shape in shapes.values()):
        raise KernelArgumentError(f"routing: entries have shapes {shapes}, expected one length [E]")
    _check_range("token_idx", entry_tokens, num_tokens)
    _check_range("slots", entry_slots, num_slots)
    _check_finite(entry_scales)


def _check_finite(scales: Tensor) -> None:
    if not bool(scales.isfinite().all()):
        raise KernelArgumentError("routing: scales holds NaN or infinity, expected finite factors")


def _check_range(name: str, values: Tensor, bound: int) -> None:
    if values.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(values))
    if low < 0 or high >= bound:
        outside = low if low < 0 else high
        raise KernelArgumentError(f"routing: {name} holds {outside}, expected 0..{bound - 1}")


def _check_lengths(
    token_idx: Tensor, scales: Tensor, seg_indptr: Tensor, seg_slots: Tensor
) -> None:
    found = {"scales": scales.shape[0], "seg_indptr": seg_indptr.shape[0]}
    expected = {"scales": token_idx.shape[0], "seg_indptr": seg_slots.shape[0] + 1}
    if found != expected:
        raise KernelArgumentError(
            f"routing: lengths are {found}, expected {expected} for {token_idx.shape[0]} entries "
            f"in {seg_slots.shape[0]} segments"
        )


def _check_segments(seg_indptr: Tensor, seg_slots: Tensor, num_entries: int) -> None:
    bounds, slots = seg_indptr.tolist(), seg_slots.tolist()
    if bounds[0] != 0 or bounds[-1] != num_entries or any(b < a for a, b in pairwise(bounds)):
        raise KernelArgumentError(
            f"routing: seg_indptr is {bounds}, expected bounds growing from 0 to {num_entries}"
        )
    if any(b <= a for a, b in pairwise(slots)):
        raise KernelArgumentError(f"routing: seg_slots is {slots}, expected strictly growing slots")


def _assemble(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    num_tokens: int,
    num_slots: int,
    device: torch.device,
) -> Routing:
    """Make a routing of checked host tensors: token_idx, seg_indptr, seg_slots, scales."""
    token_idx, seg_indptr, seg_slots, scales = tensors
    segments = _host_segments(token_idx, seg_indptr, seg_slots)
    has_unit_scales = bool((scales == 1).all())
    mixed_slots = _mixed_slots(token_idx, seg_indptr, seg_slots, scales, num_tokens)
    token_idx, seg_indptr, seg_slots, scales = _to_device(tensors, device)
    return Routing(
        token_idx=token_idx,
        scales=scales,
        seg_indptr=seg_indptr,
        seg_slots=seg_slots,
        num_tokens=num_tokens,
        num_slots=num_slots,
        segments=segments,
        has_unit_scales=has_unit_scales,
        mixed_slots=mixed_slots,
    )


def _mixed_slots(
    token_idx: Tensor, seg_indptr: Tensor, seg_slots: Tensor, scales: Tensor, num_tokens: int
) -> frozenset[int]:
    entries_by_token = torch.bincount(token_idx, minlength=num_tokens)
    is_mixed = (entries_by_token[token_idx] > 1).logical_or_(scales != 1)
    if not bool(is_mixed.any()):
        return frozenset()
    entry_slots = seg_slots.repeat_interleave(seg_indptr.diff())
    return frozenset(entry_slots[is_mixed].tolist())


def _host_segments(token_idx: Tensor, seg_indptr: Tensor, seg_slots: Tensor) -> tuple[Segment, ...]:
    tokens = token_idx.tolist()
    # breaks[i] counts the entries up to i whose token does not follow the entry before.
    breaks = [0, *accumulate(b - a != 1 for a, b in pairwise(tokens))]
    segments = []
    for (start, end), slot in zip(pairwise(seg_indptr.tolist()), seg_slots.tolist(), strict=True):
        is_run = end > start and breaks[end - 1] == breaks[start]
        first_token = tokens[start] if is_run else None
        segments.append(Segment(slot=slot, start=start, end=end, first_token=first_token))
    return tuple(segments)


def _to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy host tensors to `device` in one transfer; eight-byte dtypes come first (alignment)."""
    if device.type == "cpu":
        return list(tensors)
    host = torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors])
    if device.type == "cuda":
        host = host.pin_memory()
    packed = host.to(device, non_blocking=True)
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    parts = torch.split(packed, sizes)
    return [part.view(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]
