"""What a head gets that is tied to an embedding which the adapter changes.

PEFT lets trained token rows of an embedding reach every head tied to it, and with
``ensure_weight_tying`` its pair (transposed) and its whole replacement too
(``peft/utils/other.py``, ``set_additional_trainable_modules``; ``LoraModel._add_targets_to_tie``).
A head that has a part of that kind of its own keeps it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lora_weights.modules import LoraPair, ModuleKind, ModulePart, ModuleShape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lora_weights.bound import BaseTensors
    from lora_weights.config import AdapterConfig
    from lora_weights.experts.parts import ExpertShape


def add_tied_parts(
    parts: Mapping[str, ModulePart],
    shapes: Mapping[str, ModuleShape | ExpertShape],
    config: AdapterConfig,
    base: Callable[[str], BaseTensors | None],
) -> dict[str, ModulePart]:
    """Return the parts by base path, with those of tied heads added.

    Args:
        parts: base path -> part.
        shapes: base path -> size.
        config: says whether pairs and whole modules are tied.
        base: returns the base's tensors.
    """
    result = dict(parts)
    for path, part in parts.items():
        shape = shapes[path]
        if not isinstance(shape, ModuleShape) or shape.kind is not ModuleKind.EMBEDDING:
            continue
        shared = _shared(part, config)
        if shared is None:
            continue
        for head in find_tied_heads(path, shapes, base):
            result[head] = _add(result.get(head, ModulePart()), shared)
    return result


def find_tied_heads(
    embedding: str,
    shapes: Mapping[str, ModuleShape | ExpertShape],
    base: Callable[[str], BaseTensors | None],
) -> list[str]:
    """Return the linear modules whose weight is an embedding's own tensor."""
    own, table = shapes[embedding], base(embedding)
    assert isinstance(own, ModuleShape)
    if table is None:
        return []
    heads = []
    for path, shape in shapes.items():
        if not isinstance(shape, ModuleShape) or shape.kind is not ModuleKind.LINEAR:
            continue
        # Sizes first: asking for a base's tensors may cost something.
        if (shape.out_features, shape.in_features) != (own.in_features, own.out_features):
            continue
        head = base(path)
        if head is not None and head.weight.data_ptr() == table.weight.data_ptr():
            heads.append(path)
    return heads


def _shared(part: ModulePart, config: AdapterConfig) -> ModulePart | None:
    """Return what a tied head takes over from the embedding."""
    if not config.ensure_weight_tying:
        return None if part.token_rows is None else ModulePart(token_rows=part.token_rows)
    pair = part.pair
    if pair is not None:
        pair = LoraPair(lora_a=pair.lora_b.T, lora_b=pair.lora_a.T)
    return ModulePart(pair=pair, full=part.full, token_rows=part.token_rows)


def _add(part: ModulePart, shared: ModulePart) -> ModulePart:
    return replace(
        part,
        pair=part.pair or shared.pair,
        full=part.full or shared.full,
        token_rows=part.token_rows or shared.token_rows,
    )
