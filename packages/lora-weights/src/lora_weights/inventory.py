"""The tensors of one file sorted by module: every key is placed or named in a problem.

Knows names and shapes; reads no numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lora_weights.errors import Problem, ProblemCode
from lora_weights.experts.names import parse_expert
from lora_weights.fields import short
from lora_weights.names import SHARED_PARTS, ParsedKey, Part, parse_key
from lora_weights.placement import (
    COPY_PARTS,
    FULL_PARTS,
    LINEAR_PAIR,
    METHOD_PARTS,
    check_module,
    foreign_owner,
)
from lora_weights.renaming import Renaming

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from lora_weights.config import AdapterConfig
    from lora_weights.tensor_format import TensorEntry

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""Types that a tensor may be stored in."""

MAX_KEY_LENGTH = 256
"""Longest tensor key accepted; real ones have about 100 characters."""

_WITHOUT_NAME = COPY_PARTS | FULL_PARTS | {Part.BASE_BIAS}
"""Parts whose keys do not have to hold the adapter's name, or hold it beside clean keys.

PEFT leaves it in those of a saved module's inner biases (``bias="all"``).
"""

STACKED_AXES = 3
"""Axes of a factor that is stacked over experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairEntries:
    """Where A and B of one module lie in the file."""

    module: str
    """Module path without PEFT's prefix, renamed where the caller says so."""
    stored_as: str
    """Module path as the file spells it, which rank and alpha patterns are matched against."""
    lora_a: TensorEntry
    """`[r, I]`."""
    lora_b: TensorEntry
    """`[O, r]`."""
    is_embedding: bool
    """Stored as ``lora_embedding_A`` and ``lora_embedding_B``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleEntries:
    """Where everything of one module lies in the file."""

    module: str
    """Module path without PEFT's prefix, renamed where the caller says so."""
    stored_as: str
    """Module path as the file spells it."""
    parts: Mapping[Part, TensorEntry]
    """Part -> tensor; a trained bias is always `BASE_BIAS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What a file holds, by module."""

    modules: tuple[ModuleEntries, ...]
    """All modules that have something of their own, sorted by path."""
    pairs: tuple[PairEntries, ...]
    """The complete pairs among it, those on expert parameters left out."""
    experts: Mapping[str, Mapping[str, PairEntries]]
    """Path of an experts module -> nesting or name of a stacked projection -> its pair."""
    shared: Mapping[Part, TensorEntry]
    """Tensors that all modules share."""
    base_copies: Mapping[str, Mapping[Part, TensorEntry]]
    """Module path -> copies of the base's own weight and bias."""
    duplicates: tuple[tuple[TensorEntry, TensorEntry], ...]
    """Tensors that mean one and the same; their content must be equal."""
    skipped: tuple[str, ...]
    """Keys left out: the caller said so, or they are of no use after training."""
    problems: tuple[Problem, ...]
    """Every tensor that is in none of them, and what is not whole."""


@dataclass(slots=True)
class _Sorter:
    """Collects one file's tensors while they are sorted."""

    config: AdapterConfig
    renaming: Renaming
    modules: dict[str, dict[Part, TensorEntry]] = field(default_factory=dict)
    stored_as: dict[str, str] = field(default_factory=dict)
    shared: dict[Part, TensorEntry] = field(default_factory=dict)
    adapter_names: dict[str | None, str] = field(default_factory=dict)
    duplicates: list[tuple[TensorEntry, TensorEntry]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    own: frozenset[Part] = field(init=False)

    def __post_init__(self) -> None:
        self.own = METHOD_PARTS[self.config.peft_type]

    def add(self, entry: TensorEntry) -> None:
        """Place one tensor."""
        if len(entry.key) > MAX_KEY_LENGTH:
            # Patterns are matched against names; a hostile name would make that slow.
            found = f"{len(entry.key)} characters long"
            self._note_tensor(short(entry.key), found, f"at most {MAX_KEY_LENGTH}")
            return
        parsed = parse_key(entry.key)
        if self.renaming.skip_prefixes and self.renaming.is_skipped(parsed.module):
            self.skipped.append(entry.key)
        elif self._is_in_place(parsed, entry):
            self._place(parsed, entry)

    def _is_in_place(self, parsed: ParsedKey, entry: TensorEntry) -> bool:
        """Return whether a tensor is one of this adapter's method; note it otherwise."""
        part = parsed.part
        if part in self.own:
            return True
        if part is Part.FOREIGN:
            self._note(
                ProblemCode.FOREIGN_FORMAT,
                "",
                entry.key,
                "in the layout of another tool",
                "lora_A.weight and lora_B.weight, as PEFT writes them",
            )
        elif part is Part.UNKNOWN:
            self._note_tensor(
                entry.key, "an unsupported tensor", f"one that PEFT stores for {self._method}"
            )
        elif part is Part.TRAINING_STATE:
            if self.config.raw.get("velora_config"):
                self.skipped.append(entry.key)
            else:
                self._note_tensor(
                    entry.key, "VeLoRA's state of training", "velora_config beside it"
                )
        elif (owner := foreign_owner(part, self.config)) is not None:
            found = f"a tensor of {owner}"
            self._note_tensor(entry.key, found, f"one that PEFT stores for {self._method}")
        else:
            return True
        return False

    @property
    def _method(self) -> str:
        return self.config.peft_type

    def _place(self, parsed: ParsedKey, entry: TensorEntry) -> None:
        part = parsed.part
        if part not in _WITHOUT_NAME:
            self.adapter_names.setdefault(parsed.adapter_name, entry.key)
        if part in SHARED_PARTS:
            self._put(self.shared, part, entry)
            return
        names = self.renaming.new_names(parsed.module) if self.renaming.rename else [parsed.module]
        if len(names) > 1:
            self._note(
                ProblemCode.AMBIGUOUS_MODULE,
                parsed.module,
                entry.key,
                f"renamed to {' and to '.join(names)}",
                "renaming rules that agree",
            )
            return
        (module,) = names
        other = self.stored_as.setdefault(module, parsed.module)
        if other != parsed.module:
            found = f"renamed to {module}, and so is {other}"
            self._note(ProblemCode.DUPLICATE_MODULE, parsed.module, entry.key, found, "one of them")
            return
        self._put(self.modules.setdefault(module, {}), part, entry)

    def _put(self, parts: dict[Part, TensorEntry], part: Part, entry: TensorEntry) -> None:
        other = parts.setdefault(part, entry)
        if other is not entry:
            self.duplicates.append((other, entry))

    def check_adapter_names(self) -> None:
        """Note keys that carry two different training-time adapter names."""
        if len(self.adapter_names) > 1:
            found = ", ".join(
                f"{name or 'none'} in {key}" for name, key in self.adapter_names.items()
            )
            self._note(
                ProblemCode.MIXED_NAMES, "", "adapter names in the keys", found, "one for all keys"
            )

    def check_modules(self) -> None:
        """Bring biases under one name, and note what is not whole."""
        for module, parts in sorted(self.modules.items()):
            bias = parts.get(Part.FULL_BIAS)
            if bias is not None and Part.FULL_WEIGHT not in parts and self.config.bias != "none":
                del parts[Part.FULL_BIAS]
                self._put(parts, Part.BASE_BIAS, bias)
            self.problems += check_module(module, self.stored_as[module], parts, self.config)

    def copies(self) -> Iterator[tuple[str, dict[Part, TensorEntry]]]:
        """Take the copies of base tensors out of the modules and yield them."""
        for module, parts in sorted(self.modules.items()):
            kinds = COPY_PARTS
            if self.config.bias == "none":
                kinds |= {Part.BASE_BIAS}
            found = {part: parts.pop(part) for part in sorted(kinds & parts.keys())}
            if found:
                yield module, found

    def pairs(self) -> Iterator[PairEntries]:
        """Yield the complete pairs of all modules."""
        for module, parts in sorted(self.modules.items()):
            a, b = Part.LORA_A, Part.LORA_B
            if Part.EMBEDDING_A in parts:
                a, b = Part.EMBEDDING_A, Part.EMBEDDING_B
            if a in parts and b in parts:
                yield PairEntries(
                    module=module,
                    stored_as=self.stored_as[module],
                    lora_a=parts[a],
                    lora_b=parts[b],
                    is_embedding=a is Part.EMBEDDING_A,
                )

    def take_experts(self, pairs: Iterable[PairEntries]) -> dict[str, dict[str, PairEntries]]:
        """Take the pairs on expert parameters out of the modules; note other nested pairs."""
        experts: dict[str, dict[str, PairEntries]] = {}
        for pair in pairs:
            name = parse_expert(pair.module)
            is_stacked = len(pair.lora_a.shape) == STACKED_AXES
            if name is not None and name.expert is None and (name.is_parameter or is_stacked):
                extra = self.modules[pair.module].keys() - LINEAR_PAIR
                for part in sorted(extra):
                    key = self.modules[pair.module][part].key
                    self._note_tensor(key, "on an expert parameter", "a pair only")
                experts.setdefault(name.experts, {})[name.name] = pair
                del self.modules[pair.module]
            elif pair.module.split(".")[-1] == "base_layer":
                self._note(
                    ProblemCode.NESTED_ADAPTER,
                    pair.module,
                    "lora_A",
                    "a pair inside another adapter's layer",
                    "one pair a module; merge the two adapters before saving",
                )
        return experts

    def _note_tensor(self, key: str, found: str, expected: str) -> None:
        self._note(ProblemCode.UNSUPPORTED_TENSOR, "", key, found, expected)

    def _note(self, code: ProblemCode, module: str, tensor: str, found: str, expected: str) -> None:
        self.problems.append(
            Problem(code=code, module=module, tensor=tensor, found=found, expected=expected)
        )


def take_inventory(
    entries: Iterable[TensorEntry], config: AdapterConfig, renaming: Renaming | None = None
) -> Inventory:
    """Sort the tensors of a file by module.

    Args:
        entries: all tensors of the file.
        config: the adapter's configuration.
        renaming: what the caller wants renamed and left out.
    """
    sorter = _Sorter(config=config, renaming=renaming or Renaming())
    for entry in sorted(entries, key=lambda entry: entry.key):
        sorter.add(entry)
    sorter.check_adapter_names()
    sorter.check_modules()
    copies = dict(sorter.copies())
    found = tuple(sorter.pairs())
    experts = sorter.take_experts(found)
    return Inventory(
        modules=tuple(
            ModuleEntries(module=module, stored_as=sorter.stored_as[module], parts=parts)
            for module, parts in sorted(sorter.modules.items())
            if parts
        ),
        pairs=tuple(pair for pair in found if pair.module in sorter.modules),
        experts=experts,
        shared=sorter.shared,
        base_copies=copies,
        duplicates=tuple(sorter.duplicates),
        skipped=tuple(sorter.skipped),
        problems=tuple(sorter.problems),
    )
