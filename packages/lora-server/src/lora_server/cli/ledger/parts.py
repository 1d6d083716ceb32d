"""Parts of the ledger that are read off a model and its slots, whether it has numbers or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_layers import StackForm
from lora_server.ledger import (
    HostTierLedger,
    KvLedger,
    LayerKind,
    SlotBytes,
    SlotsLedger,
    WeightsLedger,
)
from lora_server.model.extents import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from torch import nn

    from lora_layers import LoraModelManager, StackMemory

Ranks = tuple[int, ...]
"""True rank of each slice of a stack."""


def weigh_base(module: nn.Module, manager: LoraModelManager | None) -> WeightsLedger:
    """Count parameters and buffers, each byte once."""
    size = tensor_bytes([*module.parameters(), *module.buffers()])
    every = sum(p.nbytes for _, p in module.named_parameters(remove_duplicate=False))
    return WeightsLedger(
        size_bytes=size,
        tied_bytes=every - sum(p.nbytes for p in module.parameters()),
        prepacked_bytes=0 if manager is None else manager.prepacked_bytes,
    )


def weigh_kv(*, token_bytes: int, block_size: int, num_blocks: int) -> KvLedger:
    """Describe a KV cache."""
    block_bytes = token_bytes * block_size
    return KvLedger(
        size_bytes=block_bytes * num_blocks,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        block_size=block_size,
        num_tokens=num_blocks * block_size,
    )


def weigh_slots(
    manager: LoraModelManager,
    held: Sequence[Mapping[str, Ranks]],
    *,
    generates: bool,
    with_affine: Collection[str] = (),
) -> SlotsLedger:
    """Count the slots, by kind of layer.

    Args:
        manager: whose slots they are.
        held: for each adapter in a slot, path of a stack -> its true ranks there.
        generates: whether the logits modules are the output projection, not a head.
        with_affine: paths of stacks whose gains and biases are not allocated yet and will be.
    """
    num_slots = manager.config.max_loras
    by_kind: dict[LayerKind, list[SlotBytes]] = {}
    for stack in manager.memory():
        size = stack.nbytes + (stack.affine_bytes if stack.path in with_affine else 0)
        used = sum(stack.used_bytes(ranks[stack.path]) for ranks in held if stack.path in ranks)
        occupied = size * len(held) // num_slots
        kind = layer_kind(stack, generates=generates)
        by_kind.setdefault(kind, []).append(
            SlotBytes(
                size_bytes=size,
                used_bytes=used,
                padding_bytes=occupied - used,
                empty_bytes=size - occupied,
                num_modules=1,
            )
        )
    kinds = {kind: _sum(by_kind[kind]) for kind in LayerKind if kind in by_kind}
    total = _sum(kinds.values())
    return SlotsLedger(
        total=total,
        by_kind=kinds,
        num_slots=num_slots,
        max_rank=manager.config.max_lora_rank,
        slot_bytes=total.size_bytes // num_slots,
    )


def _sum(parts: Iterable[SlotBytes]) -> SlotBytes:
    found = list(parts)
    return SlotBytes(
        size_bytes=sum(p.size_bytes for p in found),
        used_bytes=sum(p.used_bytes for p in found),
        padding_bytes=sum(p.padding_bytes for p in found),
        empty_bytes=sum(p.empty_bytes for p in found),
        num_modules=sum(p.num_modules for p in found),
    )


def layer_kind(stack: StackMemory, *, generates: bool) -> LayerKind:
    """Say what a module is in its model, by its form and by the names on its path."""
    match stack.form:
        case StackForm.EXPERTS:
            return LayerKind.EXPERTS
        case StackForm.EMBEDDING:
            return LayerKind.EMBEDDINGS
        case StackForm.LOGITS:
            return LayerKind.LM_HEAD if generates else LayerKind.HEADS
        case StackForm.LINEAR:
            names = stack.path.lower().split(".")[:-1]
            if any("attn" in name or "attention" in name for name in names):
                return LayerKind.ATTENTION
            is_in_layer = any(name.isdigit() for name in names)
            return LayerKind.MLP if is_in_layer else LayerKind.OTHER


def largest_adapter_bytes(manager: LoraModelManager) -> int:
    """Return the bytes of an adapter of the highest rank on every module."""
    rank = manager.config.max_lora_rank
    return sum(rank * sum(stack.rank_bytes) for stack in manager.memory())


def weigh_host_tier(
    manager: LoraModelManager, sizes: Sequence[int], *, held_bytes: int, num_held: int
) -> HostTierLedger:
    """Describe the host tier.

    Args:
        manager: whose adapters they are.
        sizes: bytes of every adapter that is known, there or not.
        held_bytes: of those that are there.
        num_held: how many these are.
    """
    each = max(sizes) if sizes else largest_adapter_bytes(manager)
    capacity = manager.config.host_capacity
    return HostTierLedger(
        size_bytes=held_bytes,
        num_adapters=num_held,
        capacity=capacity,
        adapter_bytes=each,
        limit_bytes=max(capacity * each, held_bytes),
    )
