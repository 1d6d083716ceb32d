"""The ledger of a service that does not run: from configurations and headers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lora_server.cli.ledger.footprint import read_footprints
from lora_server.cli.ledger.kv_budget import choose_kv
from lora_server.cli.ledger.parts import weigh_base, weigh_host_tier, weigh_kv, weigh_slots
from lora_server.cli.ledger.workspace import StepSizes, estimate_workspace
from lora_server.cli.wrap import lora_dtype, wrap_model
from lora_server.config import Task
from lora_server.ledger import (
    AdapterLedger,
    HostTierLedger,
    KvLedger,
    LedgerKind,
    MachineLedger,
    MemoryLedger,
    SlotsLedger,
    WeightsLedger,
)
from lora_server.machine import host_available_bytes, host_total_bytes, rss_bytes
from lora_server.model.planned import PlannedModel, build_planned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lora_layers import LoraModelManager
    from lora_server.cli.ledger.footprint import Footprint
    from lora_server.config import ServerConfig
    from lora_server.lora_modules import LoraModule


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The ledger, and what a plan knows beside it."""

    ledger: MemoryLedger
    problems: tuple[str, ...]
    """What would keep the service from starting."""
    slot_bytes: int
    """Bytes of one more slot; 0 without adapters."""


def plan_service(config: ServerConfig, modules: Sequence[LoraModule]) -> Plan:
    """Plan the memory of a service; no weights are read.

    Args:
        config: the options.
        modules: all adapters named at start.

    Raises:
        StartupError: the model cannot be served with these options.
    """
    model = build_planned(config)
    manager = wrap_model(model, config) if config.enable_lora else None
    weights = weigh_base(model.module, manager)
    footprints: list[Footprint] = []
    slots, host = None, None
    if manager is not None:
        footprints = read_footprints(modules, manager, base_dtype=model.dtype)
        slots, host = _adapters(manager, footprints, generates=model.task is Task.GENERATE)
    reserved = weights.size_bytes + weights.prepacked_bytes
    reserved += slots.total.size_bytes if slots else 0
    kv, max_len = _kv(config, model, reserved)
    ledger = _assemble(
        config,
        model,
        weights=weights,
        kv=kv,
        slots=slots,
        host=host,
        max_len=max_len,
        footprints=footprints,
    )
    return Plan(
        ledger=ledger,
        problems=tuple(problem for found in footprints for problem in found.problems),
        slot_bytes=slots.slot_bytes if slots else 0,
    )


def _adapters(
    manager: LoraModelManager, footprints: Sequence[Footprint], *, generates: bool
) -> tuple[SlotsLedger, HostTierLedger]:
    """Weigh both tiers once the adapters named are loaded, and as many in slots as there are."""
    config = manager.config
    largest = sorted(footprints, key=lambda found: -found.size_bytes)
    held = [found.slot_ranks for found in largest[: config.max_loras]]
    affine = {path for found in footprints for path in found.affine}
    slots = weigh_slots(manager, held, generates=generates, with_affine=affine)
    kept = footprints[-config.host_capacity :]
    host = weigh_host_tier(
        manager,
        [found.size_bytes for found in footprints],
        held_bytes=sum(found.size_bytes for found in kept),
        num_held=len(kept),
    )
    return slots, host


def _kv(config: ServerConfig, model: PlannedModel, reserved: int) -> tuple[KvLedger | None, int]:
    """Return the KV cache and the longest sequence."""
    if model.task is not Task.GENERATE:
        return None, config.max_model_len or model.context_length
    budget = choose_kv(config, model, reserved_bytes=reserved)
    kv = weigh_kv(
        token_bytes=model.kv_token_bytes,
        block_size=budget.block_size,
        num_blocks=budget.num_blocks,
    )
    return kv, budget.max_model_len


def _assemble(
    config: ServerConfig,
    model: PlannedModel,
    *,
    weights: WeightsLedger,
    kv: KvLedger | None,
    slots: SlotsLedger | None,
    host: HostTierLedger | None,
    max_len: int,
    footprints: Sequence[Footprint],
) -> MemoryLedger:
    sizes = StepSizes(
        module=model.module,
        text_config=model.text_config,
        dtype=model.dtype,
        vocab_size=model.vocab_size if kv else 0,
        kv_token_bytes=model.kv_token_bytes,
        num_kv_layers=len(model.kv_shapes),
        num_kv_tokens=kv.num_tokens if kv else 0,
        max_model_len=max_len,
    )
    return MemoryLedger(
        kind=LedgerKind.PLANNED,
        model=config.model,
        task=model.task,
        device=model.device.type,
        dtype=str(model.dtype).removeprefix("torch."),
        lora_dtype=shown_lora_dtype(config, model.dtype),
        weights=weights,
        kv_cache=kv,
        slots=slots,
        host_tier=host,
        workspace=estimate_workspace(sizes, config),
        runtime_bytes=rss_bytes(),
        adapters=tuple(
            AdapterLedger(name=found.name, rank=found.rank, size_bytes=found.size_bytes)
            for found in footprints
        ),
        machine=look_at_machine(model.device),
        process=None,
        notes=model.notes,
    )


def shown_lora_dtype(config: ServerConfig, dtype: torch.dtype) -> str | None:
    """Name the slots' data type; None without adapters."""
    if not config.enable_lora:
        return None
    return str(lora_dtype(config) or dtype).removeprefix("torch.")


def look_at_machine(device: torch.device) -> MachineLedger:
    """Say what memory there is."""
    has_device = device.type == "cuda" and torch.cuda.is_available()
    free, total = torch.cuda.mem_get_info(device) if has_device else (None, None)
    return MachineLedger(
        device=device.type,
        host_total_bytes=host_total_bytes(),
        host_available_bytes=host_available_bytes(),
        device_total_bytes=total,
        device_available_bytes=free,
    )
