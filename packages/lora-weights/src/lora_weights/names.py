"""Tensor keys of a checkpoint <-> (module path, part). The only file that knows PEFT's prefixes.

A key is a prefix, a module path, the name of a part, and sometimes the adapter's name inside:
``base_model.model.`` + ``model.layers.0.self_attn.q_proj`` + ``lora_A`` + ``weight``.
Knows nothing of shapes or of a base model.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PEFT_PREFIX = "base_model.model."

WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Segments that torch's wrappers insert anywhere in a path; no module of a base model."""

FOREIGN_SUFFIXES = (
    ".lora_down.weight",
    ".lora_up.weight",
    ".lora.down.weight",
    ".lora.up.weight",
    ".lora_linear_layer.down.weight",
    ".lora_linear_layer.up.weight",
    ".alpha",
    ".lora_a.weight",
    ".lora_b.weight",
)
"""Endings that other tools use for their own low-rank files."""


class Part(StrEnum):
    """What one tensor is to its module."""

    LORA_A = "lora_A"
    LORA_B = "lora_B"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    LORA_BIAS = "lora_B.bias"
    MAGNITUDE = "lora_magnitude_vector"
    BASE_WEIGHT = "base_layer.weight"
    BASE_BIAS = "base_layer.bias"
    ORIGINAL = "original_module"
    FULL_WEIGHT = "weight"
    FULL_BIAS = "bias"
    FOREIGN = "foreign"
    UNKNOWN = "unknown"


PAIR_PARTS = frozenset({Part.LORA_A, Part.LORA_B, Part.EMBEDDING_A, Part.EMBEDDING_B})
"""The parts that make a low-rank pair."""

_MARKERS = {
    "lora_A": (Part.LORA_A, ("weight",)),
    "lora_B": (Part.LORA_B, ("weight", "bias")),
    "lora_embedding_A": (Part.EMBEDDING_A, ("",)),
    "lora_embedding_B": (Part.EMBEDDING_B, ("",)),
    # PEFT writes the vector with and without ".weight", by release.
    "lora_magnitude_vector": (Part.MAGNITUDE, ("weight", "")),
}


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """One tensor key taken apart."""

    module: str
    """Module path without prefixes and wrapper segments."""
    part: Part
    """What the tensor is to the module."""
    adapter_name: str | None = None
    """The training-time adapter name, where the key still holds it."""


def parse_key(key: str) -> ParsedKey:
    """Take a tensor key apart.

    Args:
        key: as the file spells it.

    Returns:
        Module, part and adapter name; part `UNKNOWN` with the whole cleaned key as the module
        when nothing fits.
    """
    segments = strip_prefix(key).split(".")
    for position in range(len(segments) - 1, 0, -1):
        marker = _MARKERS.get(segments[position])
        if marker is not None:
            return _parse_lora(segments, position, *marker)
    return _parse_plain(segments)


def strip_prefix(key: str) -> str:
    """Return a key without the prefixes of PEFT and of torch's wrappers.

    One ``base_model.model.`` is removed, and a leading ``module.`` (data parallel) on either side
    of it; a key without them keeps its full name.
    """
    if "_orig_mod" in key or "_wrapped_module" in key:
        key = ".".join(part for part in key.split(".") if part not in WRAPPER_SEGMENTS)
    key = key.removeprefix("module.")
    return key.removeprefix(PEFT_PREFIX)


def _parse_lora(
    segments: list[str], position: int, part: Part, endings: tuple[str, ...]
) -> ParsedKey:
    """Parse what follows a marker: an ending, or the adapter's name and an ending."""
    module, rest = ".".join(segments[:position]), segments[position + 1 :]
    for ending in endings:
        tail = [ending] if ending else []
        name = rest[: len(rest) - len(tail)]
        if len(name) <= 1 and rest[len(name) :] == tail:
            found = Part.LORA_BIAS if ending == "bias" else part
            return ParsedKey(module, _not_weight(found, name), name[0] if name else None)
    return ParsedKey(".".join(segments), Part.UNKNOWN)


def _not_weight(part: Part, name: list[str]) -> Part:
    """Return the part, or UNKNOWN for an embedding factor that ends in ".weight" or ".bias"."""
    is_embedding = part in (Part.EMBEDDING_A, Part.EMBEDDING_B)
    return Part.UNKNOWN if is_embedding and name in (["weight"], ["bias"]) else part


def _parse_plain(segments: list[str]) -> ParsedKey:
    """Parse a key without a LoRA marker: a whole weight or bias, or a copy of the base's."""
    key = ".".join(segments)
    if f".{key}".endswith(FOREIGN_SUFFIXES):
        return ParsedKey(key, Part.FOREIGN)
    if len(segments) < 2 or segments[-1] not in ("weight", "bias"):  # noqa: PLR2004
        return ParsedKey(key, Part.UNKNOWN)
    is_bias = segments[-1] == "bias"
    path = segments[:-1]
    if path[-1] == "base_layer" and len(path) > 1:
        return ParsedKey(".".join(path[:-1]), Part.BASE_BIAS if is_bias else Part.BASE_WEIGHT)
    if "original_module" in path[1:]:
        return ParsedKey(".".join(path[: path.index("original_module")]), Part.ORIGINAL)
    full = Part.FULL_BIAS if is_bias else Part.FULL_WEIGHT
    if "modules_to_save" in path[1:-1]:
        # <module>.modules_to_save.<adapter>.<inner path of the saved module>
        position = path.index("modules_to_save", 1)
        inner = path[position + 2 :]
        return ParsedKey(".".join(path[:position] + inner), full, path[position + 1])
    return ParsedKey(".".join(path), full)


def build_key(module: str, part: Part) -> str:
    """Return the tensor key that PEFT reads for a part of a module."""
    suffix = {Part.LORA_A: "lora_A.weight", Part.LORA_B: "lora_B.weight"}.get(part, part.value)
    return f"{PEFT_PREFIX}{module}.{suffix}"
