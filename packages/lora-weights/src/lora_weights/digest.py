"""Content hash of an adapter: the identity that caches, replies and metrics use.

Two adapters have one digest when they do the same to a base model: folder, file names, key order,
prefixes and training-only fields do not enter; every tensor, scaling and pattern does.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from lora_weights.config import AdapterConfig
    from lora_weights.inventory import Inventory
    from lora_weights.scaling import ModuleScaling
    from lora_weights.tensors import TensorFile

FORMAT = "lora-weights digest 2"
"""Enters the hash, so that a changed rule never yields an old digest."""


def compute_digest(
    config: AdapterConfig,
    scalings: Mapping[str, float],
    tensors: Iterable[tuple[str, str, str, tuple[int, ...], memoryview]],
    token_ids: Mapping[str, tuple[int, ...]],
    experts: range | None = None,
) -> str:
    """Hash an adapter.

    Args:
        config: its configuration; only what is applied enters.
        scalings: module path -> factor of ``B A``, which also records the order of patterns.
        tensors: (module, part, type name, shape, raw bytes as stored), in any order.
        token_ids: module path -> tokens of its rows.
        experts: the block of experts it was cut down to; it is another adapter than the whole.

    Returns:
        64 hex digits (SHA-256).
    """
    digest = hashlib.sha256()
    header = {
        "format": FORMAT,
        "peft_type": config.peft_type,
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "use_rslora": config.use_rslora,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
        "bias": config.bias,
        "lora_bias": config.lora_bias,
        "use_dora": config.use_dora,
        "alora_invocation_tokens": config.alora_invocation_tokens,
        "ensure_weight_tying": config.ensure_weight_tying,
        "target_parameters": sorted(config.target_parameters),
        # It decides between two layouts of expert tensors, and means nothing to other adapters.
        "peft_version": config.peft_version if config.target_parameters else None,
        "scalings": dict(scalings),
        "token_ids": dict(token_ids),
    }
    if experts is not None:
        header["experts"] = [experts.start, experts.stop]
    digest.update(_canonical(header))
    for module, part, dtype, shape, content in sorted(tensors, key=lambda item: item[:2]):
        digest.update(_canonical([module, part, dtype, shape]))
        digest.update(content)
    return digest.hexdigest()


def digest_file(
    file: TensorFile,
    inventory: Inventory,
    config: AdapterConfig,
    scalings: Mapping[str, ModuleScaling],
    token_ids: Mapping[str, tuple[int, ...]],
    *,
    experts: range | None = None,
) -> str:
    """Hash the adapter in a file.

    Copies of the base's own tensors do not enter: an adapter is bound only where they equal the
    base's, and then they change nothing.

    Args:
        file: its numbers, as stored.
        inventory: what it holds, checked.
        config: its configuration.
        scalings: module path -> rank and scaling.
        token_ids: path of a module, as the file spells it -> tokens of its rows.
        experts: the experts of the whole model that were read; None is all.
    """
    tokens = {
        entries.module: token_ids[entries.stored_as]
        for entries in inventory.modules
        if entries.stored_as in token_ids
    }
    factors = {module: scaling.scaling for module, scaling in scalings.items()}
    return compute_digest(config, factors, _records(file, inventory), tokens, experts)


def _records(
    file: TensorFile, inventory: Inventory
) -> Iterator[tuple[str, str, str, tuple[int, ...], memoryview]]:
    groups = [(entries.module, entries.parts) for entries in inventory.modules]
    for module, parts in [*groups, ("", inventory.shared)]:
        for part, entry in parts.items():
            yield module, part.value, entry.dtype, entry.shape, file.content(entry)
    for path, pairs in inventory.experts.items():
        for name, pair in pairs.items():
            for factor, entry in (("lora_A", pair.lora_a), ("lora_B", pair.lora_b)):
                yield f"{path} {name}", factor, entry.dtype, entry.shape, file.content(entry)


def _canonical(value: object) -> bytes:
    """Return JSON that does not depend on key order, ended so that records cannot run together."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
