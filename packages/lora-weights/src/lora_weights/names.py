"""Tensor keys of a checkpoint <-> (module path, part). The only file that knows PEFT's prefixes.

A key is a prefix, a module path, the name of a part, and sometimes the adapter's name inside:
``base_model.model.`` + ``model.layers.0.self_attn.q_proj`` + ``lora_A`` + ``weight``.
Knows nothing of shapes or of a base model.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    """What one tensor is to its module; the value ends the key that PEFT reads."""

    LORA_A = "lora_A.weight"
    LORA_B = "lora_B.weight"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    LORA_BIAS = "lora_B.bias"
    MAGNITUDE = "lora_magnitude_vector"
    TOKEN_ROWS = "token_adapter.trainable_tokens_delta"  # noqa: S105
    IA3_GAIN = "ia3_l"
    VERA_B = "vera_lambda_b"
    VERA_D = "vera_lambda_d"
    VERA_SHARED_A = "vera_A"
    VERA_SHARED_B = "vera_B"
    HADA_W1_A = "hada_w1_a"
    HADA_W1_B = "hada_w1_b"
    HADA_W2_A = "hada_w2_a"
    HADA_W2_B = "hada_w2_b"
    HADA_T1 = "hada_t1"
    HADA_T2 = "hada_t2"
    LOKR_W1 = "lokr_w1"
    LOKR_W1_A = "lokr_w1_a"
    LOKR_W1_B = "lokr_w1_b"
    LOKR_W2 = "lokr_w2"
    LOKR_W2_A = "lokr_w2_a"
    LOKR_W2_B = "lokr_w2_b"
    LOKR_T2 = "lokr_t2"
    BASE_WEIGHT = "base_layer.weight"
    BASE_BIAS = "base_layer.bias"
    ORIGINAL_WEIGHT = "original_module.weight"
    ORIGINAL_BIAS = "original_module.bias"
    FULL_WEIGHT = "weight"
    FULL_BIAS = "bias"
    TRAINING_STATE = "lora_velora_embed"
    FOREIGN = "foreign"
    UNKNOWN = "unknown"


PAIR_PARTS = frozenset({Part.LORA_A, Part.LORA_B, Part.EMBEDDING_A, Part.EMBEDDING_B})
"""The parts that make a low-rank pair."""

SHARED_PARTS = frozenset({Part.VERA_SHARED_A, Part.VERA_SHARED_B})
"""Parts that belong to no module: one of each serves all of them."""

_BARE = (
    Part.EMBEDDING_A,
    Part.EMBEDDING_B,
    Part.IA3_GAIN,
    *(part for part in Part if part.value.startswith(("vera_", "hada_", "lokr_"))),
    Part.TRAINING_STATE,
)
"""Parts that are parameters or buffers by themselves, so that no ".weight" follows."""

_MARKERS: Mapping[str, Mapping[str, Part]] = MappingProxyType(
    {
        "lora_A": {"weight": Part.LORA_A},
        "lora_B": {"weight": Part.LORA_B, "bias": Part.LORA_BIAS},
        # PEFT writes the vector with and without ".weight", by release.
        "lora_magnitude_vector": {"weight": Part.MAGNITUDE, "": Part.MAGNITUDE},
        "trainable_tokens_delta": {"": Part.TOKEN_ROWS},
        **{part.value: {"": part} for part in _BARE},
    }
)
"""Segment that names a part -> what may follow it -> the part."""


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
        when nothing fits. The module of a shared part is empty.
    """
    segments = strip_prefix(key).split(".")
    for position in range(len(segments) - 1, -1, -1):
        if segments[position] in _MARKERS:
            # An adapter may have been called like a marker.
            is_name = position > 0 and segments[position - 1] in _MARKERS
            return _parse_marked(segments, position - is_name)
    return _parse_plain(segments)


def strip_prefix(key: str) -> str:
    """Return a key without the prefixes of PEFT and of torch's wrappers.

    One ``base_model.model.`` is removed, and a leading ``module.`` (data parallel) before it; a
    key without them keeps its full name.
    """
    if "_orig_mod" in key or "_wrapped_module" in key:
        key = ".".join(part for part in key.split(".") if part not in WRAPPER_SEGMENTS)
    key = key.removeprefix("module.")
    return key.removeprefix(PEFT_PREFIX)


def _parse_marked(segments: list[str], position: int) -> ParsedKey:
    """Parse what follows a marker: an ending, or the adapter's name and an ending."""
    endings = _MARKERS[segments[position]]
    path, rest = segments[:position], segments[position + 1 :]
    for ending, part in endings.items():
        tail = [ending] if ending else []
        name = rest[: len(rest) - len(tail)]
        if len(name) > 1 or rest[len(name) :] != tail:
            continue
        if not ending and name in (["weight"], ["bias"]):
            break
        if part in SHARED_PARTS:
            path = [] if path == ["base_model"] else path
        elif part is Part.TOKEN_ROWS and path[-1:] == ["token_adapter"]:
            path = path[:-1]
        if bool(path) is (part in SHARED_PARTS):
            break
        return ParsedKey(".".join(path), part, name[0] if name else None)
    return ParsedKey(".".join(segments), Part.UNKNOWN)


def _parse_plain(segments: list[str]) -> ParsedKey:
    """Parse a key without a marker: a whole weight or bias, or a copy of the base's."""
    key = ".".join(segments)
    if f".{key}".endswith(FOREIGN_SUFFIXES):
        return ParsedKey(key, Part.FOREIGN)
    if len(segments) < 2 or segments[-1] not in ("weight", "bias"):  # noqa: PLR2004
        return ParsedKey(key, Part.UNKNOWN)
    is_bias = segments[-1] == "bias"
    path = segments[:-1]
    if path[-1] == "base_layer" and len(path) > 1:
        owner = path[:-2] if path[-2] == "token_adapter" else path[:-1]
        part = Part.BASE_BIAS if is_bias else Part.BASE_WEIGHT
        return ParsedKey(".".join(owner), part if owner else Part.UNKNOWN)
    if "original_module" in path[1:]:
        position = path.index("original_module", 1)
        part = Part.ORIGINAL_BIAS if is_bias else Part.ORIGINAL_WEIGHT
        return ParsedKey(".".join(path[:position] + path[position + 1 :]), part)
    part = Part.FULL_BIAS if is_bias else Part.FULL_WEIGHT
    if "modules_to_save" in path[1:]:
        # <module>.modules_to_save.<adapter>.<inner path of the saved module>; the adapter is left
        # out of what PEFT saves for ``bias="all"``.
        position = path.index("modules_to_save", 1)
        name, inner = path[position + 1 : position + 2], path[position + 2 :]
        return ParsedKey(".".join(path[:position] + inner), part, name[0] if name else None)
    return ParsedKey(".".join(path), part)


def build_key(module: str, part: Part) -> str:
    """Return the tensor key that PEFT reads for a part of a module, or for a shared part."""
    return f"{PEFT_PREFIX}{module}.{part.value}" if module else f"base_model.{part.value}"
