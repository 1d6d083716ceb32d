"""How the routing of a step is built: from entries, from tokens. From runs: see `runs`.

Everything is checked and worked out on the host, without loops over tokens; a device gets all of
it in one copy that nobody waits for.

Letters: `T` tokens of the step, `E` entries, `G` segments, `N` slots.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from lora_kernels.errors import KernelArgumentError
from lora_kernels.routing import Routing, Segment
from lora_kernels.tables import KernelTables, build_tables, choose_tile
from lora_kernels.transfer import copy_together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

NO_SLOT = -1


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
    key = torch.add(entry_tokens, entry_slots, alpha=num_tokens)
    if bool((key[1:] < key[:-1]).any()):
        order = torch.argsort(key, stable=True)
        entry_tokens, entry_slots = entry_tokens[order], entry_slots[order]
        entry_scales = entry_scales[order]
    seg_slots, counts = torch.unique_consecutive(entry_slots, return_counts=True)
    return routing_of_sorted(
        entry_tokens,
        entry_scales,
        _bounds_of(counts),
        seg_slots,
        num_tokens=num_tokens,
        num_slots=num_slots,
        device=torch.device(device),
    )


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
    found = [slot for slot in token_slots if slot is not None]
    if found and min(found) < 0:
        raise out_of_range("slots", min(found), num_slots)
    slots = torch.tensor(
        [NO_SLOT if slot is None else slot for slot in token_slots], dtype=torch.int64
    )
    token_idx = (slots >= 0).nonzero().flatten()
    return build_routing(
        token_idx=token_idx,
        slots=slots[token_idx],
        num_tokens=len(token_slots),
        num_slots=num_slots,
        device=device,
    )


def check_sorted(
    token_idx: Tensor,
    scales: Tensor,
    seg_indptr: Tensor,
    seg_slots: Tensor,
    *,
    num_tokens: int,
    num_slots: int,
) -> None:
    """Check entries that should be sorted into segments already.

    Raises:
        KernelArgumentError: bounds, slots or tokens are out of range or out of order.
    """
    found = {"scales": scales.shape[0], "seg_indptr": seg_indptr.shape[0]}
    expected = {"scales": token_idx.shape[0], "seg_indptr": seg_slots.shape[0] + 1}
    if found != expected:
        raise KernelArgumentError(
            f"routing: lengths are {found}, expected {expected} for {token_idx.shape[0]} entries "
            f"in {seg_slots.shape[0]} segments"
        )
    bounds, slots = seg_indptr.tolist(), seg_slots.tolist()
    if bounds[0] != 0 or bounds[-1] != token_idx.shape[0] or bounds != sorted(bounds):
        raise KernelArgumentError(
            f"routing: seg_indptr is {bounds}, expected bounds growing from 0 to "
            f"{token_idx.shape[0]}"
        )
    if any(b <= a for a, b in pairwise(slots)):
        raise KernelArgumentError(f"routing: seg_slots is {slots}, expected strictly growing slots")
    falls = (token_idx.diff() < 0).nonzero().flatten() + 1
    if not set(falls.tolist()) <= set(bounds):
        raise KernelArgumentError(
            f"routing: token_idx falls at entries {falls.tolist()}, expected tokens to grow within "
            f"each segment of {bounds}"
        )
    _check_range("seg_slots", seg_slots, num_slots)
    _check_range("token_idx", token_idx, num_tokens)
    _check_finite(scales)


def routing_of_sorted(
    token_idx: Tensor,
    scales: Tensor,
    seg_indptr: Tensor,
    seg_slots: Tensor,
    *,
    num_tokens: int,
    num_slots: int,
    device: torch.device,
) -> Routing:
    """Make a routing of checked host tensors, sorted into segments."""
    has_unit_scales = bool((scales == 1).all())
    entries_by_token = torch.bincount(token_idx, minlength=1)
    has_repeats = int(entries_by_token.max()) > 1
    mixed_slots: frozenset[int] = frozenset()
    if has_repeats or not has_unit_scales:
        is_mixed = (entries_by_token[token_idx] > 1).logical_or_(scales != 1)
        entry_slots = seg_slots.repeat_interleave(seg_indptr.diff())
        mixed_slots = frozenset(entry_slots[is_mixed].tolist())
    return make_routing(
        token_idx,
        scales,
        seg_indptr,
        seg_slots,
        segments=_host_segments(token_idx, seg_indptr, seg_slots, has_repeats=has_repeats),
        has_unit_scales=has_unit_scales,
        has_repeated_tokens=has_repeats,
        mixed_slots=mixed_slots,
        num_tokens=num_tokens,
        num_slots=num_slots,
        device=device,
    )


def make_routing(
    token_idx: Tensor,
    scales: Tensor,
    seg_indptr: Tensor,
    seg_slots: Tensor,
    *,
    segments: tuple[Segment, ...],
    has_unit_scales: bool,
    has_repeated_tokens: bool,
    mixed_slots: frozenset[int],
    num_tokens: int,
    num_slots: int,
    device: torch.device,
) -> Routing:
    """Make a routing of host tensors and of what is known about them; see `Routing`."""
    tensors = (token_idx, scales, seg_indptr, seg_slots)
    tables = None
    if device.type != "cpu":
        host_tables = build_tables(
            *tensors, num_slots=num_slots, has_repeated_tokens=has_repeated_tokens
        )
        copied = copy_together([*tensors, *host_tables.tensors()], device)
        token_idx, scales, seg_indptr, seg_slots = copied[:4]
        tables = KernelTables.of(copied[4:])
    return Routing(
        token_idx=token_idx,
        scales=scales,
        seg_indptr=seg_indptr,
        seg_slots=seg_slots,
        token_extent=torch.empty((num_tokens, 0), dtype=torch.uint8, device=device),
        num_tokens=num_tokens,
        num_slots=num_slots,
        segments=segments,
        has_unit_scales=has_unit_scales,
        has_repeated_tokens=has_repeated_tokens,
        mixed_slots=mixed_slots,
        tile=choose_tile(token_idx.shape[0], len(segments)),
        device_tables=tables,
    )


def _host_segments(
    token_idx: Tensor, seg_indptr: Tensor, seg_slots: Tensor, *, has_repeats: bool
) -> tuple[Segment, ...]:
    bounds, slots = seg_indptr.tolist(), seg_slots.tolist()
    tokens = token_idx[seg_indptr.clamp(max=bounds[-1] - 1)].tolist() if bounds[-1] else []
    ends = token_idx[(seg_indptr[1:] - 1).clamp(min=0)].tolist() if bounds[-1] else []
    segments = []
    for g, ((start, end), slot) in enumerate(zip(pairwise(bounds), slots, strict=True)):
        # Tokens grow within a segment: its first and last tell whether some are left out.
        is_run = end > start and ends[g] - tokens[g] == end - start - 1
        if is_run and has_repeats:
            is_run = bool((token_idx[start:end].diff() == 1).all())
        first_token = tokens[g] if is_run else None
        segments.append(Segment(slot=slot, start=start, end=end, first_token=first_token))
    return tuple(segments)


def _bounds_of(counts: Tensor) -> Tensor:
    bounds = counts.new_zeros(counts.shape[0] + 1)
    torch.cumsum(counts, 0, out=bounds[1:])
    return bounds


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
        raise out_of_range(name, low if low < 0 else high, bound)


def out_of_range(name: str, found: int, bound: int) -> KernelArgumentError:
    """Return the error that names a value, and what it should be."""
    return KernelArgumentError(f"routing: {name} holds {found}, expected 0..{bound - 1}")
