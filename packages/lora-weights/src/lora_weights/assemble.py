"""From an inventory to the parts of an adapter: scaling folded in, types held, nothing dropped.

Everything here reads numbers, and the fold writes the file's memory: check and hash it before.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from lora_weights.adapter import BaseCopy
from lora_weights.experts.names import PROJECTIONS
from lora_weights.experts.stored import PARAMETERS, StoredExperts, StoredPair
from lora_weights.methods.build import build_factors
from lora_weights.methods.ia3 import build_gain
from lora_weights.modules import FullModule, LoraPair, ModulePart, TokenRows
from lora_weights.names import Part
from lora_weights.placement import METHOD_PARTS
from lora_weights.scaling import fold_scaling_

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lora_weights.config import AdapterConfig
    from lora_weights.inventory import Inventory, ModuleEntries, PairEntries
    from lora_weights.methods.factors import Factors
    from lora_weights.scaling import ModuleScaling, ScalingTable
    from lora_weights.tensor_format import TensorEntry
    from lora_weights.tensors import TensorFile

LORA_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types an adapter can be held in."""

_WEIGHT_COPIES = frozenset({Part.BASE_WEIGHT, Part.ORIGINAL_WEIGHT})


class Assembler:
    """Builds the parts of one adapter out of its file."""

    def __init__(
        self,
        file: TensorFile,
        inventory: Inventory,
        config: AdapterConfig,
        table: ScalingTable,
        *,
        scalings: Mapping[str, ModuleScaling],
        token_ids: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype | None,
        experts: range | None = None,
    ) -> None:
        self._file = file
        self._inventory = inventory
        self._config = config
        self._table = table
        self._scalings = scalings
        self._token_ids = token_ids
        self._dtype = dtype
        self._local = experts
        # Base copies are large and soon compared and dropped; views would keep them in memory.
        self._keeps_file = not inventory.base_copies
        self._pairs = {pair.module: pair for pair in inventory.pairs}
        self._shared = {part: self._tensor(entry) for part, entry in inventory.shared.items()}

    def parts(self) -> dict[str, ModulePart]:
        """Return module path -> part."""
        parts = {entries.module: self._part(entries) for entries in self._inventory.modules}
        for path, pairs in self._inventory.experts.items():
            parts[path] = ModulePart(experts=self._experts(pairs))
        return parts

    def base_copies(self) -> dict[str, BaseCopy]:
        """Return module path -> copies of the base's own tensors."""
        return {module: self._copy(parts) for module, parts in self._inventory.base_copies.items()}

    def _part(self, entries: ModuleEntries) -> ModulePart:
        scaling, parts = self._scalings[entries.module].scaling, entries.parts
        pair = self._pairs.get(entries.module)
        if pair is not None and len(parts) == 2:  # noqa: PLR2004 (A and B, nearly every module)
            return ModulePart(pair=self._pair(pair, scaling))
        bias = self._vector(parts.get(Part.LORA_BIAS))
        gain = parts.get(Part.IA3_GAIN)
        return ModulePart(
            pair=None if pair is None else self._pair(pair, scaling),
            lora_bias=None if bias is None else bias * scaling,
            bias=self._vector(parts.get(Part.BASE_BIAS)),
            magnitude=self._vector(parts.get(Part.MAGNITUDE)),
            gain=None if gain is None else build_gain(self._tensor(gain)),
            factors=self._factors(entries),
            full=self._full(parts),
            token_rows=self._token_rows(entries),
        )

    def _pair(self, pair: PairEntries, scaling: float) -> LoraPair:
        """Return a pair with the scaling folded in: float32 product first, then the one cast."""
        lora_a, lora_b = self._tensor(pair.lora_a), self._tensor(pair.lora_b)
        target_a, target_b = self._held(lora_a), self._held(lora_b)
        if lora_b.dtype == target_b:
            lora_b = fold_scaling_(lora_b, scaling)
        else:
            lora_b = fold_scaling_(lora_b.to(torch.float32, copy=True), scaling).to(target_b)
        return LoraPair(lora_a=lora_a.to(target_a), lora_b=lora_b, is_embedding=pair.is_embedding)

    def _factors(self, entries: ModuleEntries) -> Factors | None:
        own = METHOD_PARTS[self._config.peft_type]
        tensors = {
            part: self._tensor(entry) for part, entry in entries.parts.items() if part in own
        }
        if self._config.peft_type not in ("VERA", "LOHA", "LOKR") or not tensors:
            return None
        return build_factors(
            self._config.peft_type,
            tensors,
            self._shared,
            rank=self._scalings[entries.module].rank,
            alpha=self._table.alpha(entries.stored_as),
            dtype=self._held(next(iter(tensors.values()))),
        )

    def _full(self, parts: Mapping[Part, TensorEntry]) -> FullModule | None:
        weight, bias = parts.get(Part.FULL_WEIGHT), parts.get(Part.FULL_BIAS)
        if weight is None:
            return None
        return FullModule(
            weight=self._whole(weight), bias=None if bias is None else self._whole(bias)
        )

    def _token_rows(self, entries: ModuleEntries) -> TokenRows | None:
        rows = entries.parts.get(Part.TOKEN_ROWS)
        if rows is None:
            return None
        ids = torch.tensor(self._token_ids[entries.stored_as], dtype=torch.int64)
        return TokenRows(token_ids=ids, rows=self._whole(rows))

    def _experts(self, pairs: Mapping[str, PairEntries]) -> StoredExperts:
        """Return the pairs on expert parameters as they are: only a base tells what they mean."""
        found = {}
        for name, pair in pairs.items():
            found[name] = StoredPair(
                lora_a=self._tensor(pair.lora_a),
                lora_b=self._tensor(pair.lora_b),
                scalings=parameter_scalings(name, pair, self._table),
            )
        return StoredExperts(
            pairs=MappingProxyType(found),
            dtype=self._dtype,
            peft_version=self._config.peft_version,
            parameters=tuple(name.rpartition(".")[2] for name in self._config.target_parameters),
            local=self._local,
        )

    def _copy(self, parts: Mapping[Part, TensorEntry]) -> BaseCopy:
        """Return the copies of one module, each with its own key for the messages."""
        tensors = {entry.key: self._tensor(entry) for entry in parts.values()}
        weights = {e.key for part, e in parts.items() if part in _WEIGHT_COPIES}
        return BaseCopy(
            weights={key: tensor for key, tensor in tensors.items() if key in weights},
            biases={key: tensor for key, tensor in tensors.items() if key not in weights},
        )

    def _tensor(self, entry: TensorEntry) -> torch.Tensor:
        tensor = self._file.tensor(entry)
        return tensor if self._keeps_file else tensor.clone()

    def _whole(self, entry: TensorEntry) -> torch.Tensor:
        """Return a tensor that replaces the base's: as stored, float64 as float32."""
        tensor = self._tensor(entry)
        return tensor if tensor.dtype in LORA_DTYPES else tensor.float()

    def _vector(self, entry: TensorEntry | None) -> torch.Tensor | None:
        """Return a vector in float32: it is small, and enters sums with the base's."""
        return None if entry is None else self._tensor(entry).float()

    def _held(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the type to hold a factor in: float64 is held in float32."""
        stored = tensor.dtype if tensor.dtype in LORA_DTYPES else torch.float32
        return self._dtype or stored


def parameter_scalings(
    name: str, pair: PairEntries, table: ScalingTable
) -> dict[str, ModuleScaling]:
    """Return rank and scaling of a stacked pair by the name of each parameter it may be.

    Args:
        name: nesting of the pair, or the name of its projection.
        pair: where it lies.
        table: of the adapter.
    """
    owner = pair.stored_as.removesuffix(f".{name}") if name else pair.stored_as
    names = (name,) if name in PROJECTIONS else PARAMETERS
    return {key: table.resolve(f"{owner}.{key}") for key in names}
