"""What an adapter takes, by the header of its file: ranks in its slot, bytes in host memory.

No tensor is read. Names of modules are matched with the model's by their ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lora_layers import StackForm
from lora_weights import ModuleKind, ModuleShape, PartKind, inspect_adapter

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch

    from lora_layers import LoraModelManager, StackMemory
    from lora_server.lora_modules import LoraModule
    from lora_weights import AdapterReport, ExpertShape, ModuleSummary

_FLOAT_BYTES = 4
_PAIRS = frozenset({PartKind.PAIR, PartKind.EXPERTS})
_FACTORS = frozenset({PartKind.VERA, PartKind.LOHA, PartKind.LOKR})
_VECTORS = frozenset({PartKind.DORA, PartKind.GAIN, PartKind.LORA_BIAS, PartKind.BIAS})
_GAINS = frozenset({PartKind.DORA, PartKind.GAIN})
_STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_EXPERT_SLICES = {"w1": 0, "gate_proj": 0, "w3": 1, "up_proj": 1, "w2": -1, "down_proj": -1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """One adapter, as far as its header tells."""

    name: str
    rank: int
    size_bytes: int
    """In host memory, packed."""
    slot_ranks: Mapping[str, tuple[int, ...]] = field(repr=False)
    """Path of a stack -> true rank of each of its slices."""
    affine: frozenset[str]
    """Paths of the stacks that it gives a gain or a bias."""
    problems: tuple[str, ...]
    """What keeps it from being served."""


class FootprintReader:
    """Reads headers for one wrapped model."""

    def __init__(self, manager: LoraModelManager, *, base_dtype: torch.dtype) -> None:
        self._shapes = manager.shapes
        self._stacks = manager.memory()
        self._lora_bytes = (manager.config.lora_dtype or base_dtype).itemsize
        self._base_bytes = base_dtype.itemsize
        self._max_rank = manager.config.max_lora_rank
        self._slices = {
            path: (stack, index)
            for stack in self._stacks
            for index, path in enumerate(stack.member_paths)
        }

    def read(self, module: LoraModule) -> Footprint:
        """Look at one adapter."""
        report = inspect_adapter(module.path, max_rank=self._max_rank, read_tensors=False)
        ranks: dict[str, list[int]] = {}
        affine: set[str] = set()
        one_by_one: dict[str, StackMemory] = {}
        size = 0
        for summary in report.modules:
            stack, index = self._find(summary.module)
            if stack is not None:
                held = ranks.setdefault(stack.path, [0] * len(stack.rank_bytes))
                for i in range(len(held)) if index is None else (index,):
                    held[i] = max(held[i], summary.rank)
                if not _VECTORS.isdisjoint(summary.kinds):
                    affine.add(stack.path)
            if stack is not None and _is_one_expert(summary, stack):
                one_by_one[stack.path] = stack
            else:
                size += self._pair_bytes(summary, stack) + self._other_bytes(summary)
        # Pairs of single experts are stacked, all to the highest rank among them.
        size += sum(stack.used_bytes(ranks[path]) for path, stack in one_by_one.items())
        return Footprint(
            name=module.name,
            rank=report.rank,
            size_bytes=size + self._vector_bytes(report),
            slot_ranks={path: tuple(found) for path, found in ranks.items()},
            affine=frozenset(affine),
            problems=tuple(f"adapter {module.name!r}: {problem}" for problem in report.problems),
        )

    def _find(self, module: str) -> tuple[StackMemory | None, int | None]:
        """Return the stack that a module belongs to, and which slice of it, None for all."""
        path = find_path(module, self._slices)
        if path is not None:
            stack, index = self._slices[path]
            return stack, None if stack.form is StackForm.EXPERTS else index
        for stack in self._stacks:
            if find_path(module, [stack.path]) is not None:
                return stack, None
        return self._find_experts(module)

    def _find_experts(self, module: str) -> tuple[StackMemory | None, int | None]:
        """Return the experts of the layer with the module's number, and which product it is."""
        layer = _first_number(module)
        for stack in self._stacks:
            if stack.form is StackForm.EXPERTS and _first_number(stack.path) == layer:
                place = _EXPERT_SLICES.get(module.rpartition(".")[2])
                return stack, None if place is None else place % len(stack.rank_bytes)
        return None, None

    def _pair_bytes(self, summary: ModuleSummary, stack: StackMemory | None) -> int:
        """Return the bytes of what is low-rank."""
        if not _PAIRS.isdisjoint(summary.kinds):
            numbers = math.prod(summary.shape_a) + math.prod(summary.shape_b)
            return numbers * self._lora_bytes
        if not _FACTORS.isdisjoint(summary.kinds) and stack is not None:
            shape = self._shape(summary.module)
            return summary.rank * _width(shape) * self._lora_bytes
        return 0

    def _other_bytes(self, summary: ModuleSummary) -> int:
        """Return the bytes of a whole module, or of rows of an embedding, which become ranks."""
        stored = _STORED_BYTES.get(summary.dtype, _FLOAT_BYTES)
        if PartKind.FULL in summary.kinds:
            return summary.nbytes * self._base_bytes // stored
        if PartKind.TOKEN_ROWS in summary.kinds:
            shape = self._shape(summary.module)
            if isinstance(shape, ModuleShape) and shape.kind is ModuleKind.EMBEDDING:
                rows = summary.nbytes // (shape.out_features * stored)
                return rows * _width(shape) * self._lora_bytes
        return 0

    def _vector_bytes(self, report: AdapterReport) -> int:
        """Return the bytes of gains and biases: one of each for a whole packed group."""
        found: set[tuple[str, bool]] = set()
        widths = {}
        for summary in report.modules:
            stack, _ = self._find(summary.module)
            if stack is not None:
                found |= {
                    (stack.path, kind in _GAINS) for kind in summary.kinds if kind in _VECTORS
                }
                widths[stack.path] = sum(self._outputs(path) for path in stack.member_paths)
        return sum(widths[path] * _FLOAT_BYTES for path, _ in found)

    def _outputs(self, path: str) -> int:
        shape = self._shapes.get(path)
        return shape.out_features if isinstance(shape, ModuleShape) else 0

    def _shape(self, module: str) -> ModuleShape | ExpertShape | None:
        path = find_path(module, self._shapes)
        return None if path is None else self._shapes[path]


def find_path(module: str, paths: Collection[str]) -> str | None:
    """Return the path that a module's name in a file means: one ends with the other."""
    if module in paths:
        return module
    for path in paths:
        if path.endswith(f".{module}") or module.endswith(f".{path}"):
            return path
    return None


def read_footprints(
    modules: Sequence[LoraModule], manager: LoraModelManager, *, base_dtype: torch.dtype
) -> list[Footprint]:
    """Look at the headers of all adapters."""
    reader = FootprintReader(manager, base_dtype=base_dtype)
    return [reader.read(module) for module in modules]


def _is_one_expert(summary: ModuleSummary, stack: StackMemory) -> bool:
    """Whether it is the pair of one expert in a file that stores them one by one."""
    return stack.form is StackForm.EXPERTS and PartKind.EXPERTS not in summary.kinds


def _width(shape: ModuleShape | ExpertShape | None) -> int:
    return shape.in_features + shape.out_features if isinstance(shape, ModuleShape) else 0


def _first_number(path: str) -> int | None:
    return next((int(part) for part in path.split(".") if part.isdigit()), None)
