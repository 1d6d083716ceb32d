"""A ledger, and what traffic needs, as tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lora_server.ledger import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lora_server.cli.plan.advice import TierAdvice, TrafficAdvice
    from lora_server.ledger import MemoryLedger, SlotBytes

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024
_COLOURS = {
    Verdict.FITS: "green",
    Verdict.TIGHT: "yellow",
    Verdict.DOES_NOT_FIT: "red",
    Verdict.UNKNOWN: "yellow",
}
_MAX_ADAPTERS = 20
"""Adapters that are written out."""


def size_text(size: float) -> str:
    """Return bytes for people, such as 1.5 GiB."""
    for unit in _UNITS:
        if abs(size) < _STEP or unit == _UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= _STEP
    raise AssertionError(size)


def print_plan(
    ledger: MemoryLedger,
    advice: TrafficAdvice | None,
    problems: tuple[str, ...],
    console: Console | None = None,
) -> None:
    """Print everything a plan has found."""
    out = console or Console()
    types = (
        ledger.dtype if ledger.lora_dtype is None else f"{ledger.dtype}, LoRA {ledger.lora_dtype}"
    )
    out.print(f"{escape(ledger.model)}: {ledger.task} on {ledger.device}, {types}")
    out.print(_ledger_table(ledger))
    if ledger.adapters:
        out.print(_adapter_table(ledger))
    for note in ledger.notes:
        out.print(f"[yellow]note[/]  {escape(note)}")
    for problem in problems:
        out.print(f"[red]  -[/] {escape(problem)}")
    _print_verdict(ledger, out)
    if advice is not None:
        _print_advice(advice, out)


def _ledger_table(ledger: MemoryLedger) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("part")
    table.add_column("size", justify="right")
    table.add_column("what it is")
    for part, size, text in (*_model_rows(ledger), *_tier_rows(ledger)):
        table.add_row(part, size_text(size), escape(text))
    work = ledger.workspace
    table.add_row("workspace (estimate)", size_text(work.size_bytes), _workspace_text(ledger))
    table.add_row("Python and libraries", size_text(ledger.runtime_bytes), "as this process has it")
    table.add_section()
    table.add_row("total", size_text(ledger.total_bytes), "after start", style="bold")
    if ledger.limit_bytes != ledger.total_bytes:
        table.add_row("", size_text(ledger.limit_bytes), "with a full host tier", style="bold")
    return table


def _model_rows(ledger: MemoryLedger) -> Iterator[tuple[str, int, str]]:
    weights = ledger.weights
    tied = f"{size_text(weights.tied_bytes)} saved by tying" if weights.tied_bytes else ""
    yield "base weights", weights.size_bytes, tied
    if weights.prepacked_bytes:
        yield "  prepacked copies", weights.prepacked_bytes, "bfloat16 in the CPU's own layout"
    kv = ledger.kv_cache
    if kv is not None:
        text = (
            f"{kv.num_blocks} blocks of {size_text(kv.block_bytes)}, {kv.block_size} tokens each:"
            f" {kv.num_tokens} tokens"
        )
        yield "KV cache", kv.size_bytes, text


def _tier_rows(ledger: MemoryLedger) -> Iterator[tuple[str, int, str]]:
    slots, host = ledger.slots, ledger.host_tier
    if slots is not None:
        text = (
            f"{slots.num_slots} slots of rank {slots.max_rank}, {size_text(slots.slot_bytes)} each"
        )
        yield "LoRA slots", slots.total.size_bytes, text
        for kind, part in slots.by_kind.items():
            yield f"  {kind}", part.size_bytes, _slot_text(part)
        yield "  of this padding", slots.total.padding_bytes, "highest rank minus the true ranks"
    if host is not None:
        text = (
            f"{host.num_adapters} of {host.capacity} adapters,"
            f" {size_text(host.adapter_bytes)} for one, {size_text(host.limit_bytes)} when full"
        )
        yield "host tier", host.size_bytes, text


def _slot_text(part: SlotBytes) -> str:
    return (
        f"{part.num_modules} modules: {size_text(part.used_bytes)} used,"
        f" {size_text(part.padding_bytes)} padding, {size_text(part.empty_bytes)} empty"
    )


def _workspace_text(ledger: MemoryLedger) -> str:
    work = ledger.workspace
    return (
        f"{size_text(work.activations_bytes)} activations + {size_text(work.attention_bytes)}"
        f" attention, or {size_text(work.logits_bytes)} logits"
    )


def _adapter_table(ledger: MemoryLedger) -> Table:
    table = Table("adapter", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("in host memory", justify="right")
    for adapter in ledger.adapters[:_MAX_ADAPTERS]:
        table.add_row(escape(adapter.name), str(adapter.rank), size_text(adapter.size_bytes))
    if len(ledger.adapters) > _MAX_ADAPTERS:
        table.add_row(f"and {len(ledger.adapters) - _MAX_ADAPTERS} more", "", "")
    return table


def _print_verdict(ledger: MemoryLedger, out: Console) -> None:
    machine = ledger.machine
    there = (
        f"{size_text(machine.host_available_bytes)} of {size_text(machine.host_total_bytes)} host"
    )
    if machine.device_available_bytes is not None and machine.device_total_bytes is not None:
        device = size_text(machine.device_available_bytes)
        there += f", {device} of {size_text(machine.device_total_bytes)} {machine.device}"
    colour = _COLOURS[ledger.verdict]
    needed = size_text(ledger.limit_bytes)
    out.print(f"[bold {colour}]{ledger.verdict}[/]: {needed} needed; free: {there} memory")


def _print_advice(advice: TrafficAdvice, out: Console) -> None:
    out.print(
        f"\n{advice.num_requests} requests of {advice.num_adapters} adapters,"
        f" one after the other; aim: {advice.target_hit_rate:.1%} find theirs"
    )
    for title, unit, tier in (
        ("in a slot", "slots", advice.slots),
        ("in host memory", "adapters", advice.host),
    ):
        out.print(_tier_table(title, unit, tier))
        out.print(_tier_text(unit, tier, advice.target_hit_rate))


def _tier_table(title: str, unit: str, tier: TierAdvice) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(unit, justify="right")
    table.add_column(title, justify="right")
    table.add_column("size", justify="right")
    table.add_column("")
    for rate in tier.rates:
        mark = "configured" if rate.count == tier.configured.count else ""
        if tier.smallest is not None and rate.count == tier.smallest.count:
            mark = f"enough, {mark}" if mark else "enough"
        table.add_row(str(rate.count), f"{rate.hit_rate:.1%}", size_text(rate.size_bytes), mark)
    return table


def _tier_text(unit: str, tier: TierAdvice, target: float) -> str:
    if tier.smallest is None:
        best = max(rate.hit_rate for rate in tier.rates)
        return (
            f"no number of {unit} gives {target:.1%}: first uses are misses; the best is {best:.1%}"
        )
    return f"{tier.smallest.count} {unit}, {size_text(tier.smallest.size_bytes)}, are enough"
