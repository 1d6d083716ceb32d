"""The tensors of one file sorted by module: every key is placed or named in a problem.

Knows names and shapes; reads no numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lora_weights.errors import Problem, ProblemCode
from lora_weights.fields import short
from lora_weights.names import PAIR_PARTS, Part, parse_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lora_weights.config import AdapterConfig
    from lora_weights.tensor_format import TensorEntry

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""Types a factor may be stored in."""

MAX_KEY_LENGTH = 256
"""Longest tensor key accepted; real ones have about 100 characters."""

_NOT_YET = {
    Part.MAGNITUDE: "DoRA magnitudes are not applied yet",
    Part.LORA_BIAS: "the bias of lora_B is not applied yet",
    Part.FULL_WEIGHT: "whole weights (modules_to_save) are not applied yet",
    Part.FULL_BIAS: "trained biases and whole modules are not applied yet",
    Part.BASE_BIAS: "copies of base biases are not compared",
    Part.ORIGINAL: "untrained copies of whole modules are not compared",
    Part.UNKNOWN: "it is no part of a LoRA",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairEntries:
    """Where A and B of one module lie in the file."""

    module: str
    """Module path without PEFT's prefix."""
    lora_a: TensorEntry
    """`[r, I]`."""
    lora_b: TensorEntry
    """`[O, r]`."""
    is_embedding: bool
    """Stored as ``lora_embedding_A`` and ``lora_embedding_B``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What a file holds, by module."""

    pairs: tuple[PairEntries, ...]
    """Complete pairs, sorted by module."""
    base_copies: Mapping[str, TensorEntry]
    """Module path -> copy of the base weight stored beside its pair."""
    problems: tuple[Problem, ...]
    """Every tensor that is in neither of them, and pairs that are not whole."""
    has_more: bool
    """Whether tensors other than pairs and base copies were found."""


@dataclass(slots=True)
class _Sorter:
    """Collects one file's tensors while they are sorted."""

    config: AdapterConfig
    modules: dict[str, dict[Part, TensorEntry]] = field(default_factory=dict)
    adapter_names: dict[str | None, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    has_more: bool = False

    def add(self, entry: TensorEntry) -> None:
        """Place one tensor."""
        if len(entry.key) > MAX_KEY_LENGTH:
            # Patterns are matched against names; a hostile name would make that slow.
            found = f"{len(entry.key)} characters long"
            expected = f"at most {MAX_KEY_LENGTH}"
            self._note(ProblemCode.UNSUPPORTED_TENSOR, "", short(entry.key), found, expected)
            self.has_more = True
            return
        parsed = parse_key(entry.key)
        if parsed.part in PAIR_PARTS:
            self.adapter_names.setdefault(parsed.adapter_name, entry.key)
        elif parsed.part is not Part.BASE_WEIGHT:
            self.has_more = True
            self._refuse(parsed.part, parsed.module, entry)
            return
        parts = self.modules.setdefault(parsed.module, {})
        other = parts.setdefault(parsed.part, entry)
        if other is not entry:
            self._note(
                ProblemCode.DUPLICATE_TENSOR,
                parsed.module,
                parsed.part,
                f"stored twice ({other.key} and {entry.key})",
                "one tensor",
            )

    def _refuse(self, part: Part, module: str, entry: TensorEntry) -> None:
        """Name a tensor that is not applied, unless a refused field says so for all of them."""
        if part is Part.FOREIGN:
            expected = "lora_A.weight and lora_B.weight, as PEFT writes them"
            found = "in the layout of another tool"
            self._note(ProblemCode.FOREIGN_FORMAT, "", entry.key, found, expected)
            return
        explained = {
            Part.MAGNITUDE: self.config.use_dora,
            Part.LORA_BIAS: self.config.lora_bias,
            Part.FULL_BIAS: self.config.bias != "none",
        }
        if not explained.get(part, False):
            found = f"an unsupported tensor of {module}" if module else "an unsupported tensor"
            expected = f"only low-rank pairs: {_NOT_YET[part]}"
            self._note(ProblemCode.UNSUPPORTED_TENSOR, "", entry.key, found, expected)

    def check_adapter_names(self) -> None:
        """Note keys that carry two different training-time adapter names."""
        if len(self.adapter_names) > 1:
            found = ", ".join(
                f"{name or 'none'} in {key}" for name, key in self.adapter_names.items()
            )
            self._note(
                ProblemCode.MIXED_NAMES, "", "adapter names in the keys", found, "one for all keys"
            )

    def pairs(self) -> Iterable[PairEntries]:
        """Yield the complete pairs; note modules that have half of one, or two."""
        for module, parts in sorted(self.modules.items()):
            found = PAIR_PARTS & parts.keys()
            if not found:
                continue
            if not self._is_plain_module(module):
                self.has_more = True
            elif found == {Part.LORA_A, Part.LORA_B}:
                yield _pair(module, parts, Part.LORA_A, Part.LORA_B)
            elif found == {Part.EMBEDDING_A, Part.EMBEDDING_B}:
                yield _pair(module, parts, Part.EMBEDDING_A, Part.EMBEDDING_B)
            else:
                names = " and ".join(sorted(part.value for part in found))
                self._note(
                    ProblemCode.INCOMPLETE_PAIR,
                    module,
                    names,
                    "there without its counterpart" if len(found) == 1 else "a mixed pair",
                    "lora_A with lora_B, or lora_embedding_A with lora_embedding_B",
                )

    def _is_plain_module(self, module: str) -> bool:
        """Return whether a pair belongs to a module; note expert parameters and nesting."""
        path = module.split(".")
        is_nested = path[-1] == "base_layer"
        owner = path[-2:-1] if is_nested else path[-1:]
        if owner == ["experts"]:
            if not self.config.raw.get("target_parameters"):
                expected = "a module: adapters on expert parameters are not applied yet"
                found = "on an expert parameter"
                self._note(ProblemCode.UNSUPPORTED_TENSOR, module, "lora_A", found, expected)
            return False
        if is_nested:
            expected = "one pair a module; merge the two adapters before saving"
            found = "a pair inside another adapter's layer"
            self._note(ProblemCode.NESTED_ADAPTER, module, "lora_A", found, expected)
        return not is_nested

    def base_copies(self, modules: set[str]) -> Iterable[tuple[str, TensorEntry]]:
        """Yield copies of base weights beside a pair; note the others."""
        for module, parts in sorted(self.modules.items()):
            entry = parts.get(Part.BASE_WEIGHT)
            if entry is None:
                continue
            if module in modules:
                yield module, entry
            elif not PAIR_PARTS & parts.keys():
                found, expected = "a base weight without a pair", "a low-rank pair beside it"
                self._note(ProblemCode.UNSUPPORTED_TENSOR, "", entry.key, found, expected)

    def _note(self, code: ProblemCode, module: str, tensor: str, found: str, expected: str) -> None:
        self.problems.append(
            Problem(code=code, module=module, tensor=tensor, found=found, expected=expected)
        )


def take_inventory(entries: Iterable[TensorEntry], config: AdapterConfig) -> Inventory:
    """Sort the tensors of a file by module.

    Args:
        entries: all tensors of the file.
        config: the adapter's configuration; a refused feature it declares is not named again
            for each tensor.
    """
    sorter = _Sorter(config=config)
    for entry in sorted(entries, key=lambda entry: entry.key):
        sorter.add(entry)
    sorter.check_adapter_names()
    pairs = tuple(sorter.pairs())
    copies = dict(sorter.base_copies({pair.module for pair in pairs}))
    return Inventory(
        pairs=pairs,
        base_copies=copies,
        problems=tuple(sorter.problems),
        has_more=sorter.has_more,
    )


def _pair(module: str, parts: Mapping[Part, TensorEntry], a: Part, b: Part) -> PairEntries:
    return PairEntries(
        module=module,
        lora_a=parts[a],
        lora_b=parts[b],
        is_embedding=a is Part.EMBEDDING_A,
    )
