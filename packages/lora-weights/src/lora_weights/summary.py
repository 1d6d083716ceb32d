"""What each module of an adapter gets, in names and numbers: the table of a report."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from lora_weights.assemble import parameter_scalings
from lora_weights.kinds import PartKind
from lora_weights.names import Part
from lora_weights.norms import part_norms
from lora_weights.placement import LOHA_PARTS, LOKR_PARTS, VERA_PARTS
from lora_weights.scaling import ScalingTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from lora_weights.inventory import Inventory, ModuleEntries
    from lora_weights.load import Reading
    from lora_weights.tensor_format import TensorEntry

_KINDS: Mapping[Part, PartKind] = MappingProxyType(
    {
        Part.LORA_A: PartKind.PAIR,
        Part.LORA_B: PartKind.PAIR,
        Part.EMBEDDING_A: PartKind.PAIR,
        Part.EMBEDDING_B: PartKind.PAIR,
        Part.MAGNITUDE: PartKind.DORA,
        Part.LORA_BIAS: PartKind.LORA_BIAS,
        Part.BASE_BIAS: PartKind.BIAS,
        Part.IA3_GAIN: PartKind.GAIN,
        Part.FULL_WEIGHT: PartKind.FULL,
        Part.TOKEN_ROWS: PartKind.TOKEN_ROWS,
        **dict.fromkeys(VERA_PARTS, PartKind.VERA),
        **dict.fromkeys(LOHA_PARTS, PartKind.LOHA),
        **dict.fromkeys(LOKR_PARTS, PartKind.LOKR),
    }
)

_LOW_RANK = frozenset(
    {PartKind.PAIR, PartKind.EXPERTS, PartKind.VERA, PartKind.LOHA, PartKind.LOKR}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSummary:
    """One module in a report."""

    module: str
    """Module path without PEFT's prefix."""
    kinds: tuple[PartKind, ...]
    """What the adapter does to it."""
    rank: int
    """Rank of what is low-rank, by the configuration; 0 where nothing is."""
    scaling: float
    """Factor of ``B A``; 1 where nothing is low-rank."""
    shape_a: tuple[int, ...]
    """Stored shape of A; empty without a pair."""
    shape_b: tuple[int, ...]
    """Stored shape of B; empty without a pair."""
    dtype: str
    """Stored type of B, or of the first tensor, such as BF16."""
    is_embedding: bool
    """Whether it is the pair of an embedding."""
    nbytes: int
    """Bytes of its tensors in the file."""
    norms: Mapping[PartKind, float] = field(default_factory=dict)
    """Size of what it does, by kind, as far as the adapter alone can tell (`part_norms`); empty
    when the numbers were not read or the adapter cannot be loaded."""

    @property
    def update_norm(self) -> float | None:
        """Frobenius norm of ``scaling * B A``, when it is known."""
        return self.norms.get(PartKind.PAIR)


def summarize(reading: Reading) -> Iterator[ModuleSummary]:
    """Yield a line for each module of an adapter, sorted by path.

    Args:
        reading: as far as the adapter could be read.
    """
    if reading.inventory is None:
        return
    found = [*_modules(reading, reading.inventory), *_experts(reading, reading.inventory)]
    yield from sorted(found, key=lambda summary: summary.module)


def _modules(reading: Reading, inventory: Inventory) -> Iterator[ModuleSummary]:
    for entries in inventory.modules:
        kinds = tuple(dict.fromkeys(_KINDS[part] for part in entries.parts if part in _KINDS))
        if kinds:
            yield _summary(reading, entries, kinds)


def _experts(reading: Reading, inventory: Inventory) -> Iterator[ModuleSummary]:
    """Yield the pairs that are stacked over experts.

    Which parameter each is for follows from a base's sizes; where ranks or scalings of the
    parameters differ, the largest is told.
    """
    if reading.config is None:
        return
    table = ScalingTable(reading.config)
    for pairs in inventory.experts.values():
        for name, pair in pairs.items():
            scalings = parameter_scalings(name, pair, table).values()
            yield ModuleSummary(
                module=pair.module,
                kinds=(PartKind.EXPERTS,),
                rank=max(scaling.rank for scaling in scalings),
                scaling=max(scaling.scaling for scaling in scalings),
                shape_a=pair.lora_a.shape,
                shape_b=pair.lora_b.shape,
                dtype=pair.lora_b.dtype,
                is_embedding=False,
                nbytes=sum(entry.end - entry.start for entry in (pair.lora_a, pair.lora_b)),
            )


def _summary(
    reading: Reading, entries: ModuleEntries, kinds: tuple[PartKind, ...]
) -> ModuleSummary:
    lora_a = entries.parts.get(Part.LORA_A) or entries.parts.get(Part.EMBEDDING_A)
    lora_b = entries.parts.get(Part.LORA_B) or entries.parts.get(Part.EMBEDDING_B)
    scaling = reading.scalings.get(entries.module) if not _LOW_RANK.isdisjoint(kinds) else None
    return ModuleSummary(
        module=entries.module,
        kinds=kinds,
        rank=scaling.rank if scaling else 0,
        scaling=scaling.scaling if scaling else 1.0,
        shape_a=lora_a.shape if lora_a else (),
        shape_b=lora_b.shape if lora_b else (),
        dtype=_dtype(entries, lora_b),
        is_embedding=Part.EMBEDDING_A in entries.parts,
        nbytes=sum(entry.end - entry.start for entry in entries.parts.values()),
        norms=_norms(reading, entries.module),
    )


def _dtype(entries: ModuleEntries, lora_b: TensorEntry | None) -> str:
    return (lora_b or next(iter(entries.parts.values()))).dtype


def _norms(reading: Reading, module: str) -> Mapping[PartKind, float]:
    part = reading.adapter.parts.get(module) if reading.adapter else None
    return MappingProxyType({} if part is None else part_norms(part))
