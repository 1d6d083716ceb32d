"""Checks of an adapter's numbers: finite, within the range of their type, and with an effect.

Knows no base model; `validate` looks again at what only a base can tell.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lora_weights.errors import Problem, ProblemCode
from lora_weights.inventory import FLOAT_DTYPES
from lora_weights.names import Part
from lora_weights.placement import LOHA_PARTS, VERA_PARTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lora_weights.inventory import Inventory
    from lora_weights.modules import LoraPair
    from lora_weights.scaling import ModuleScaling
    from lora_weights.tensor_format import TensorEntry
    from lora_weights.tensors import TensorFile

_SURELY = frozenset({Part.MAGNITUDE, Part.BASE_BIAS, Part.FULL_WEIGHT, Part.TOKEN_ROWS})
"""Parts that replace something of the base's: whether by the same value, only a base can tell."""


def check_finite(file: TensorFile) -> tuple[float, list[Problem]]:
    """Look for NaN and infinity in the whole file.

    Returns:
        An upper bound of the absolute values, and a problem for each tensor that has any.
    """
    largest, problems = 0.0, []
    for flat, entries in file.runs():
        if not flat.is_floating_point() or flat.dtype.itemsize == 1 or not flat.numel():
            continue
        bound = _bound(flat)
        if math.isfinite(bound):
            largest = max(largest, bound)
        else:
            problems += _not_finite(file, entries)
    return largest, problems


def _bound(flat: torch.Tensor) -> float:
    """Return at least the largest absolute value; not finite when any value is not."""
    if flat.dtype == torch.float32:
        # The norm takes a fifth of the time of a search; squares of huge values overflow in it.
        norm = float(torch.linalg.vector_norm(flat))
        if math.isfinite(norm):
            return norm
    low, high = (bound.item() for bound in torch.aminmax(flat))
    return max(abs(low), abs(high)) if math.isfinite(low + high) else math.inf


def _not_finite(file: TensorFile, entries: Iterable[TensorEntry]) -> list[Problem]:
    problems = []
    for entry in entries:
        tensor = file.tensor(entry)
        count = tensor.numel() - int(torch.isfinite(tensor).sum())
        if count:
            found = f"NaN or infinite in {count} of {tensor.numel()} values"
            problems.append(
                Problem(
                    code=ProblemCode.NOT_FINITE,
                    tensor=entry.key,
                    found=found,
                    expected="finite numbers",
                )
            )
    return problems


def check_overflow(pairs: Mapping[str, LoraPair]) -> list[Problem]:
    """Return a problem for each pair whose values left the range of its type.

    Args:
        pairs: module path -> pair after scaling and cast.
    """
    problems = []
    for module, pair in pairs.items():
        for name, tensor in (("lora_A", pair.lora_a), ("lora_B", pair.lora_b)):
            if not torch.isfinite(tensor).all():
                limit = torch.finfo(tensor.dtype).max
                problems.append(
                    Problem(
                        code=ProblemCode.NOT_FINITE,
                        module=module,
                        tensor=name,
                        found=f"outside the range of {tensor.dtype} once it is scaled",
                        expected=f"values up to {limit:g}",
                    )
                )
    return problems


def check_duplicates(file: TensorFile, inventory: Inventory) -> list[Problem]:
    """Return a problem for tensors that mean the same and differ.

    PEFT stores some tensors under two keys, such as the magnitudes of an embedding.
    """
    return [
        Problem(
            code=ProblemCode.DUPLICATE_TENSOR,
            tensor=second.key,
            found=f"stored twice with different content ({first.key})",
            expected="one tensor",
        )
        for first, second in inventory.duplicates
        if (first.dtype, first.shape) != (second.dtype, second.shape)
        or file.content(first) != file.content(second)
    ]


def check_effect(
    file: TensorFile, inventory: Inventory, scalings: Mapping[str, ModuleScaling]
) -> list[Problem]:
    """Return a problem when an adapter would change nothing.

    Args:
        file: the numbers.
        inventory: what the file holds.
        scalings: module path -> rank and scaling.
    """
    if not inventory.modules and not inventory.experts:
        return [] if inventory.problems else [no_effect("without a single tensor of an adapter")]
    if any(
        _is_set(file, pair.lora_b, pair.lora_a)
        for pairs in inventory.experts.values()
        for pair in pairs.values()
    ):
        return []
    for entries in inventory.modules:
        if _may_change(file, entries.parts, inventory.shared, scalings[entries.module].scaling):
            return []
    return [no_effect("zero in A, B or scaling of every module")]


def _may_change(
    file: TensorFile,
    parts: Mapping[Part, TensorEntry],
    shared: Mapping[Part, TensorEntry],
    scaling: float,
) -> bool:
    """Return whether the tensors of a module may change its output."""
    if _SURELY & parts.keys():
        return True
    if Part.IA3_GAIN in parts:
        gain = parts[Part.IA3_GAIN]
        return gain.dtype not in FLOAT_DTYPES or bool((file.tensor(gain) != 1).any())
    if parts.keys() & VERA_PARTS:
        return _is_set(file, *parts.values(), *shared.values())
    if not scaling:
        return False
    if parts.keys() & LOHA_PARTS or any(part.startswith("lokr_") for part in parts):
        return _is_set(file, *parts.values())
    # B first: it is what PEFT starts with zeros.
    order = (Part.LORA_B, Part.LORA_A, Part.EMBEDDING_B, Part.EMBEDDING_A)
    pair = [parts[part] for part in order if part in parts]
    bias = parts.get(Part.LORA_BIAS)
    return (bool(pair) and _is_set(file, *pair)) or (bias is not None and _is_set(file, bias))


def _is_set(file: TensorFile, *entries: TensorEntry) -> bool:
    """Return whether no tensor is all zero; types that are refused anyway count as set."""
    return all(e.dtype not in FLOAT_DTYPES or bool(file.tensor(e).any()) for e in entries)


def no_effect(found: str) -> Problem:
    """Return the problem of an adapter that would change nothing."""
    return Problem(
        code=ProblemCode.NO_EFFECT,
        found=found,
        expected="at least one tensor that changes something; it would change nothing",
    )
