"""The operators registered with `torch.library`, so that `torch.compile` can step over them.

A graph holds tensors and numbers only, so a `Routing` and `StackedWeights` go in as lists of their
tensors and are put together again inside. Eager calls do not come here: the dispatcher alone would
cost them 30 us each.

Registering is what importing this module does; nothing else happens at import.

Letters: `T` tokens, `E` entries, `N` slots, `P` slices, `R` max rank, `I` in, `O` out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lora_kernels import dispatch
from lora_kernels.backend import Backend
from lora_kernels.build import routing_of_sorted
from lora_kernels.checks import (
    check_activations,
    check_buffer,
    check_gains,
    check_output,
    check_pairing,
    check_token_ids,
)
from lora_kernels.routing import Routing
from lora_kernels.tables import KernelTables, choose_tile
from lora_kernels.weights import HAS_BIAS, HAS_GAIN, StackedWeights

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

NAMESPACE = "lora_kernels"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_STEP = (
    "Tensor[] weights, int[] out_features, Tensor[] routing, int num_slots, int padded_tile, "
    "str backend, bool batch_invariant"
)
MEMO = "_lora_kernels_memo"
"""Attribute of a list's first tensor: the object that was put together, for the next layers."""


def step_arguments(
    weights: StackedWeights, routing: Routing, backend: Backend, *, batch_invariant: bool
) -> tuple[list[Tensor], list[int], list[Tensor], int, int, str, bool]:
    """Return what the registered operators take for weights and routing.

    Numbers that change from step to step are left to the shapes of tensors: each other value of an
    int of a module would be compiled anew.
    """
    factors = [weights.a_storage, weights.b_storage, weights.slot_table]
    if weights.affine is not None:
        factors.append(weights.affine)
    return (
        factors,
        list(weights.out_features),
        *routing_arguments(routing),
        backend.value,
        batch_invariant,
    )


def routing_arguments(routing: Routing) -> tuple[list[Tensor], int, int]:
    """Return what the registered operators take for a routing: see `rebuild_routing`."""
    entries = [
        routing.token_extent,
        routing.token_idx,
        routing.scales,
        routing.seg_indptr,
        routing.seg_slots,
    ]
    if routing.device_tables is not None:
        entries.extend(routing.device_tables.tensors())
    return entries, routing.num_slots, routing.tile if routing.is_padded else 0


def rebuild_routing(
    entries: list[Tensor], num_slots: int, padded_tile: int, *, for_kernels: bool
) -> Routing:
    """Put a routing together again: for kernels without waiting for a device, else for loops."""
    if for_kernels:
        return _routing_for_kernels(entries, num_slots, padded_tile)
    return _routing_for_host(entries, num_slots)


def _unpack(step: tuple[Any, ...]) -> tuple[StackedWeights, Routing, dict[str, Any]]:
    """Return weights, routing, and the keywords of `dispatch`."""
    factors, out_features, entries, num_slots, padded_tile, name, batch_invariant = step
    backend = Backend(name)
    how = {"backend": backend, "batch_invariant": batch_invariant}
    weights = _rebuild_weights(factors, out_features, needs_host=backend is not Backend.TRITON)
    for_kernels = backend is Backend.TRITON
    return weights, rebuild_routing(entries, num_slots, padded_tile, for_kernels=for_kernels), how


def _rebuild_weights(
    factors: list[Tensor], out_features: list[int], *, needs_host: bool
) -> StackedWeights:
    a_storage, b_storage, slot_table, *affine = factors
    weights: StackedWeights | None = getattr(a_storage, MEMO, None)
    if weights is None or not are_same([weights.b_storage], [b_storage]):
        # Of detached tensors: a tensor that held itself would outlive its last user.
        weights = StackedWeights(a_storage.detach(), b_storage.detach(), out_features)
        setattr(a_storage, MEMO, weights)
    weights.slot_table = slot_table
    weights.affine = affine[0] if affine else None
    if needs_host:
        table = slot_table.tolist()
        weights.slot_ranks = [tuple(row[:-1]) for row in table]
        weights.gain_slots = frozenset(s for s, row in enumerate(table) if row[-1] & HAS_GAIN)
        weights.bias_slots = frozenset(s for s, row in enumerate(table) if row[-1] & HAS_BIAS)
    return weights


def _routing_for_host(entries: list[Tensor], num_slots: int) -> Routing:
    extent, token_idx = entries[:2]
    made: tuple[list[Tensor], Routing] | None = getattr(token_idx, MEMO, None)
    if made is not None and are_same(made[0], entries) and made[1].num_slots == num_slots:
        return made[1]
    kept = [tensor.detach() for tensor in entries]
    routing = routing_of_sorted(
        *(tensor.cpu() for tensor in kept[1:5]),
        num_tokens=extent.shape[0],
        num_slots=num_slots,
        device=token_idx.device,
    )
    setattr(token_idx, MEMO, (kept, routing))
    return routing


def _routing_for_kernels(entries: list[Tensor], num_slots: int, padded_tile: int) -> Routing:
    """What launchers read: nothing that the host would have to wait for."""
    extent, token_idx, scales, seg_indptr, seg_slots, *tables = entries
    if not tables:  # in the interpreter, where the tables are made on demand
        return _routing_for_host(entries, num_slots)
    return Routing(
        token_idx=token_idx,
        scales=scales,
        seg_indptr=seg_indptr,
        seg_slots=seg_slots,
        token_extent=extent,
        num_tokens=extent.shape[0],
        num_slots=num_slots,
        segments=(),
        has_unit_scales=False,
        has_repeated_tokens=True,
        mixed_slots=frozenset(),
        tile=padded_tile or choose_tile(token_idx.shape[0], seg_slots.shape[0]),
        device_tables=KernelTables.of(tables),
        is_padded=True,
    )


def are_same(kept: list[Tensor], given: list[Tensor]) -> bool:
    """Return whether tensors that are kept, so that nothing else has their memory, are given."""
    pairs = zip(kept, given, strict=False)
    return all(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in pairs)


def _shrink(x: Tensor, *step: Any) -> Tensor:
    weights, routing, how = _unpack(step)
    check_pairing("shrink", routing, weights)
    check_activations("shrink", x, routing, weights)
    if routing.is_empty:
        return _shrink_fake(x, *step)
    return dispatch.shrink(x, weights, routing, **how)


def _expand_(y: Tensor, v: Tensor, *step: Any) -> None:
    weights, routing, how = _unpack(step)
    check_pairing("expand_", routing, weights)
    check_output("expand_", y, routing, weights)
    check_buffer("expand_", v, routing, weights)
    check_gains("expand_", routing, weights)
    if not routing.is_empty:
        dispatch.expand_(y, v, weights, routing, **how)


def _apply_lora_(y: Tensor, x: Tensor, *step: Any) -> None:
    weights, routing, how = _unpack(step)
    check_pairing("apply_lora_", routing, weights)
    check_activations("apply_lora_", x, routing, weights)
    check_output("apply_lora_", y, routing, weights)
    check_gains("apply_lora_", routing, weights)
    if not routing.is_empty:
        dispatch.apply_lora_(y, x, weights, routing, **how)


def _embedding_lora_(y: Tensor, token_ids: Tensor, *step: Any) -> None:
    weights, routing, how = _unpack(step)
    check_pairing("embedding_lora_", routing, weights)
    check_token_ids("embedding_lora_", token_ids, routing, weights)
    check_output("embedding_lora_", y, routing, weights)
    check_gains("embedding_lora_", routing, weights)
    if not routing.is_empty:
        dispatch.embedding_lora_(y, token_ids, weights, routing, **how)


def _shrink_fake(x: Tensor, *step: Any) -> Tensor:
    """Shape and dtype alone: `[P, E, R]` float32."""
    factors, out_features, entries = step[:3]
    shape = (len(out_features), entries[1].shape[0], factors[0].shape[0])
    return x.new_empty(shape, dtype=torch.float32)


def _nothing(*arguments: object) -> None:
    """Of an operator that writes in place there is nothing to say."""


def register(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator with its schema, implementation and fake function."""
    tags = (torch.Tag.pt2_compliant_tag,)
    _LIBRARY.define(f"{name}{schema}", tags=tags)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)


register("shrink", f"(Tensor x, {_STEP}) -> Tensor", _shrink, _shrink_fake)
register("expand_", f"(Tensor(a!) y, Tensor v, {_STEP}) -> ()", _expand_, _nothing)
register("apply_lora_", f"(Tensor(a!) y, Tensor x, {_STEP}) -> ()", _apply_lora_, _nothing)
register(
    "embedding_lora_",
    f"(Tensor(a!) y, Tensor token_ids, {_STEP}) -> ()",
    _embedding_lora_,
    _nothing,
)
