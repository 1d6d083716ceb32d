"""``load_adapter``: from a source to a checked `Adapter`, all problems at once.

The steps are files, configuration, inventory, checks, digest, fold. `read_adapter` runs as many
of them as the content allows and collects; `load_adapter` raises what it collected.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from lora_weights import checks
from lora_weights.adapter import Adapter
from lora_weights.checkpoint import read_checkpoint
from lora_weights.digest import compute_digest
from lora_weights.errors import (
    AdapterError,
    InvalidAdapterError,
    Problem,
    SourceError,
)
from lora_weights.inventory import Inventory, PairEntries, take_inventory
from lora_weights.modules import LoraPair, ModulePart
from lora_weights.names import Part
from lora_weights.scaling import ModuleScaling, ScalingTable, fold_scaling_
from lora_weights.sources.address import shown_source
from lora_weights.sources.open import open_source
from lora_weights.sources.options import DEFAULT_MAX_BYTES, FetchOptions

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from lora_weights.config import AdapterConfig
    from lora_weights.sources.folder import AdapterFiles
    from lora_weights.tensors import TensorFile

LORA_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types an adapter can be held in."""


@dataclass(slots=True, kw_only=True)
class Reading:
    """What is known about a source so far."""

    files: AdapterFiles
    """The files found."""
    problems: list[Problem] = field(default_factory=list)
    """Everything wrong so far."""
    config: AdapterConfig | None = None
    """The configuration, when rank and alpha could be told."""
    tensors: TensorFile | None = None
    """The weight file, when it could be read."""
    inventory: Inventory | None = None
    """Its tensors by module."""
    scalings: dict[str, ModuleScaling] = field(default_factory=dict)
    """Rank and scaling of each module with a pair."""
    digest: str | None = None
    """Content hash, when the inventory is clean."""
    adapter: Adapter | None = None
    """The result, when there is no problem."""


def load_adapter(
    source: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_rank: int | None = None,
    allow_pickle: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    storage_options: Mapping[str, object] | None = None,
) -> Adapter:
    """Read an adapter and check everything that can be told without a base model.

    Args:
        source: a folder: a path, ``~`` included, or ``file:///path``; or ``s3://bucket/folder``,
            ``gs://bucket/folder`` (extra ``remote``), ``https://host/folder``, ``hf://owner/name``
            or ``owner/name``, both with an optional ``@revision`` (extra ``hub``). See
            `lora_weights.sources.address.parse_address` for what counts as which.
        dtype: type of the tensors in memory (float32, float16, bfloat16); None keeps the file's.
        max_rank: largest rank accepted; None accepts any.
        allow_pickle: read ``adapter_model.bin`` or ``.pt`` where there is no safetensors file,
            with torch's restricted unpickler.
        cache_dir: where downloads are kept; None is ``.cache/lora-weights`` in the home folder.
        max_bytes: most bytes the files of the adapter may have together, wherever they lie.
        storage_options: credentials and endpoints of a remote source, as its storage takes them.

    Raises:
        AdapterNotFoundError: no folder there, or no ``adapter_config.json`` in it.
        InvalidAdapterError: the adapter cannot be used; carries every problem.
        UnsafeFormatError: the only weights are a pickle file and `allow_pickle` is false.
        SourceError: the files cannot be read or fetched; the original error is the cause.
        ValueError: `dtype`, `max_rank` or `max_bytes` is not one that can be asked for.
    """
    reading = read_adapter(
        source,
        dtype=dtype,
        max_rank=max_rank,
        allow_pickle=allow_pickle,
        fetch=FetchOptions(
            cache_dir=cache_dir, max_bytes=max_bytes, storage_options=storage_options or {}
        ),
    )
    if reading.adapter is None:
        raise InvalidAdapterError(reading.problems, source=shown_source(source))
    return reading.adapter


def read_adapter(
    source: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None,
    max_rank: int | None,
    allow_pickle: bool,
    fetch: FetchOptions,
    read_tensors: bool = True,
) -> Reading:
    """Read a source as far as its content allows.

    Arguments and errors as for `load_adapter`, except that problems are collected, not raised.
    Without `read_tensors` only names and shapes are read, and there is no adapter in the end.
    """
    if dtype is not None and dtype not in LORA_DTYPES:
        names = ", ".join(str(choice) for choice in LORA_DTYPES)
        raise ValueError(f"dtype is {dtype}, expected one of {names}")
    if max_rank is not None and max_rank < 1:
        raise ValueError(f"max_rank is {max_rank}, expected at least 1")
    try:
        with open_source(
            source, fetch, allow_pickle=allow_pickle, read_tensors=read_tensors
        ) as opened:
            reading = Reading(files=opened.files)
            reading.config, reading.tensors, reading.problems = read_checkpoint(
                opened.files,
                allow_pickle=allow_pickle,
                read_tensors=read_tensors,
                max_bytes=fetch.max_bytes,
            )
            if reading.config is not None and reading.tensors is not None:
                _check(reading, reading.config, reading.tensors, max_rank, dtype)
            if not reading.problems:
                opened.keep()
    except AdapterError:
        raise
    except OSError as error:
        raise SourceError(source=shown_source(source), reason=str(error)) from error
    return reading


def _check(
    reading: Reading,
    config: AdapterConfig,
    file: TensorFile,
    max_rank: int | None,
    dtype: torch.dtype | None,
) -> None:
    """Check the tensors against the configuration; build the adapter when all is well."""
    inventory = take_inventory(file.entries, config)
    table = ScalingTable(config)
    scalings = {pair.module: table.resolve(pair.module) for pair in inventory.pairs}
    reading.inventory, reading.scalings = inventory, scalings
    reading.problems += inventory.problems
    for pair in inventory.pairs:
        reading.problems += checks.check_pair(pair, scalings[pair.module].rank)
    if max_rank is not None:
        reading.problems += checks.check_max_rank(config, inventory.pairs, max_rank)
    if not file.has_numbers:
        return
    largest, problems = checks.check_finite(file)
    reading.problems += problems
    reading.problems += checks.check_effect(file, inventory, scalings)
    if not reading.problems:
        reading.digest = _digest(config, file, inventory, scalings)
        _build(reading, config, file, largest, dtype)


def _digest(
    config: AdapterConfig,
    file: TensorFile,
    inventory: Inventory,
    scalings: Mapping[str, ModuleScaling],
) -> str:
    def records() -> Iterator[tuple[str, str, str, tuple[int, ...], memoryview]]:
        for pair in inventory.pairs:
            names = (Part.LORA_A, Part.LORA_B)
            if pair.is_embedding:
                names = (Part.EMBEDDING_A, Part.EMBEDDING_B)
            for name, entry in zip(names, (pair.lora_a, pair.lora_b), strict=True):
                yield pair.module, name.value, entry.dtype, entry.shape, file.content(entry)
        for module, entry in inventory.base_copies.items():
            copy = Part.BASE_WEIGHT.value
            yield module, copy, entry.dtype, entry.shape, file.content(entry)

    factors = {module: scaling.scaling for module, scaling in scalings.items()}
    return compute_digest(config, factors, records())


def _build(
    reading: Reading,
    config: AdapterConfig,
    file: TensorFile,
    largest: float,
    dtype: torch.dtype | None,
) -> None:
    """Fold, cast and check the result. Writes the file's memory, so it comes after the digest."""
    inventory, scalings = reading.inventory, reading.scalings
    assert inventory is not None
    assert reading.digest is not None
    # Base copies are large and soon compared and dropped; views would keep them in memory.
    keep_file = not inventory.base_copies
    pairs = {
        pair.module: _build_pair(
            file, pair, scalings[pair.module].scaling, dtype, keep_file=keep_file
        )
        for pair in inventory.pairs
    }
    # Checking each tensor is slow; it is needed only when a product can leave a type's range.
    factor = max(1.0, *(abs(scaling.scaling) for scaling in scalings.values()))
    held = {t.dtype for pair in pairs.values() for t in (pair.lora_a, pair.lora_b)}
    if any(largest * factor > torch.finfo(kind).max for kind in held):
        reading.problems += checks.check_overflow(pairs)
    reading.problems += checks.check_tied(config, pairs)
    # A cast to a narrow type can turn the smallest values into zero.
    if not any(bool(p.lora_a.any()) and bool(p.lora_b.any()) for p in pairs.values()):
        reading.problems.append(checks.no_effect(f"zero in every pair when held in {dtype}"))
    if reading.problems:
        return
    reading.adapter = Adapter(
        config=config,
        parts=MappingProxyType({name: ModulePart(pair=pair) for name, pair in pairs.items()}),
        digest=reading.digest,
        source=reading.files.source,
        base_copies=MappingProxyType(
            {name: file.tensor(entry).clone() for name, entry in inventory.base_copies.items()}
        ),
    )


def _build_pair(
    file: TensorFile,
    pair: PairEntries,
    scaling: float,
    dtype: torch.dtype | None,
    *,
    keep_file: bool,
) -> LoraPair:
    """Return a pair with the scaling folded in: float32 product first, then the one cast."""
    lora_a, lora_b = file.tensor(pair.lora_a), file.tensor(pair.lora_b)
    if not keep_file:
        lora_a, lora_b = lora_a.clone(), lora_b.clone()
    target_a, target_b = (dtype or _held_dtype(t.dtype) for t in (lora_a, lora_b))
    if lora_b.dtype == target_b:
        lora_b = fold_scaling_(lora_b, scaling)
    else:
        lora_b = fold_scaling_(lora_b.to(torch.float32, copy=True), scaling).to(target_b)
    return LoraPair(lora_a=lora_a.to(target_a), lora_b=lora_b, is_embedding=pair.is_embedding)


def _held_dtype(stored: torch.dtype) -> torch.dtype:
    """Return the type to hold a stored one in: float64 is held in float32."""
    return stored if stored in LORA_DTYPES else torch.float32
