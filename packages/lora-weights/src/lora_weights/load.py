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
from lora_weights.assemble import LORA_DTYPES, Assembler, parameter_scalings
from lora_weights.checkpoint import read_checkpoint
from lora_weights.digest import digest_file
from lora_weights.errors import (
    AdapterError,
    InvalidAdapterError,
    Problem,
    SourceError,
)
from lora_weights.experts.reading import select_experts
from lora_weights.header_checks import check_header, check_max_rank
from lora_weights.inventory import Inventory, take_inventory
from lora_weights.names import Part
from lora_weights.renaming import Renaming
from lora_weights.scaling import ModuleScaling, ScalingTable
from lora_weights.sources.address import shown_source
from lora_weights.sources.open import open_source
from lora_weights.sources.options import DEFAULT_MAX_BYTES, FetchOptions
from lora_weights.token_rows import assign_tokens

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from lora_weights.config import AdapterConfig
    from lora_weights.modules import ModulePart
    from lora_weights.sources.folder import AdapterFiles
    from lora_weights.tensors import TensorFile


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
    """Rank and scaling of each module."""
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
    rename: Mapping[str, str] | None = None,
    skip_prefixes: Sequence[str] = (),
    experts: range | None = None,
) -> Adapter:
    """Read an adapter and check everything that can be told without a base model.

    Args:
        source: a folder: a path, ``~`` included, or ``file:///path``; or ``s3://bucket/folder``,
            ``gs://bucket/folder`` (extra ``remote``), ``https://host/folder``, ``hf://owner/name``
            or ``owner/name``, both with an optional ``@revision`` (extra ``hub``). See
            `lora_weights.sources.address.parse_address` for what counts as which.
        dtype: type of the pairs in memory (float32, float16, bfloat16); None keeps the file's.
            Whole modules and token rows keep theirs, gains and biases are float32.
        max_rank: largest rank accepted; None accepts any.
        allow_pickle: read ``adapter_model.bin`` or ``.pt`` where there is no safetensors file,
            with torch's restricted unpickler.
        cache_dir: where downloads are kept; None is ``.cache/lora-weights`` in the home folder.
        max_bytes: most bytes the files of the adapter may have together, wherever they lie.
        storage_options: credentials and endpoints of a remote source, as its storage takes them.
        rename: prefix of a module path -> what stands in its place, in whole components. Patterns
            of the configuration are matched against the names of the file.
        skip_prefixes: prefixes of module paths whose tensors are left out, such as ``mtp.``; the
            adapter lists them.
        experts: the experts of this rank (`expert_range`), where they are spread over several;
            None is all. Those of other ranks are not read where a file keeps them apart, and left
            out by `bind_adapter` where it does not. The digest is then one of this block only.

    Raises:
        AdapterNotFoundError: no folder there, or no ``adapter_config.json`` in it.
        InvalidAdapterError: the adapter cannot be used; carries every problem.
        UnsafeFormatError: the only weights are a pickle file and `allow_pickle` is false.
        SourceError: the files cannot be read or fetched; the original error is the cause.
        ValueError: `dtype`, `max_rank`, `max_bytes` or `experts` is not one that can be asked for.
    """
    reading = read_adapter(
        source,
        dtype=dtype,
        max_rank=max_rank,
        allow_pickle=allow_pickle,
        fetch=FetchOptions(
            cache_dir=cache_dir, max_bytes=max_bytes, storage_options=storage_options or {}
        ),
        renaming=Renaming(rename=rename or {}, skip_prefixes=skip_prefixes),
        experts=experts,
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
    renaming: Renaming | None = None,
    experts: range | None = None,
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
    if experts is not None and (not experts or experts.step != 1 or experts.start < 0):
        raise ValueError(f"experts is {experts}, expected a block of them")
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
                select=None if experts is None else select_experts(experts),
            )
            if reading.config is not None and reading.tensors is not None:
                _check(
                    reading,
                    reading.config,
                    reading.tensors,
                    max_rank=max_rank,
                    dtype=dtype,
                    renaming=renaming or Renaming(),
                    experts=experts,
                )
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
    *,
    max_rank: int | None,
    dtype: torch.dtype | None,
    renaming: Renaming,
    experts: range | None,
) -> None:
    """Check the tensors against the configuration; build the adapter when all is well."""
    inventory = take_inventory(file.entries, config, renaming)
    table = ScalingTable(config)
    scalings = {entries.module: table.resolve(entries.stored_as) for entries in inventory.modules}
    rows = [entries.stored_as for entries in inventory.modules if Part.TOKEN_ROWS in entries.parts]
    token_ids, problems = assign_tokens(rows, config)
    reading.inventory, reading.scalings = inventory, scalings
    reading.problems += [*inventory.problems, *problems]
    header_problems = list(check_header(inventory, config, scalings, token_ids))
    reading.problems += header_problems
    # The rank that other methods' factors make can be told only of factors that fit together.
    is_sound = config.peft_type == "LORA" or not (header_problems or inventory.problems)
    if max_rank is not None and is_sound:
        reading.problems += check_max_rank(inventory, config, scalings, max_rank)
    if not file.has_numbers:
        return
    largest, problems = checks.check_finite(file)
    reading.problems += problems + checks.check_duplicates(file, inventory)
    if experts is None:
        # One rank may have nothing of an adapter that changes other experts.
        reading.problems += checks.check_effect(file, inventory, scalings)
    if reading.problems:
        return
    factors = scalings | _expert_scalings(inventory, table)
    reading.digest = digest_file(file, inventory, config, factors, token_ids, experts=experts)
    assembler = Assembler(
        file,
        inventory,
        config,
        table,
        scalings=scalings,
        token_ids=token_ids,
        dtype=dtype,
        experts=experts,
    )
    _build(reading, config, assembler, largest, dtype=dtype, experts=experts)


def _expert_scalings(inventory: Inventory, table: ScalingTable) -> dict[str, ModuleScaling]:
    """Return the scalings of all that the stacked pairs may turn out to be."""
    return {
        f"{path} {name}.{key}": scaling
        for path, pairs in inventory.experts.items()
        for name, pair in pairs.items()
        for key, scaling in parameter_scalings(name, pair, table).items()
    }


def _build(
    reading: Reading,
    config: AdapterConfig,
    assembler: Assembler,
    largest: float,
    *,
    dtype: torch.dtype | None,
    experts: range | None,
) -> None:
    """Fold, cast and check the result. Writes the file's memory, so it comes after the digest."""
    assert reading.digest is not None
    assert reading.inventory is not None
    parts = assembler.parts()
    pairs = {path: part.pair for path, part in parts.items() if part.pair is not None}
    # Checking each tensor is slow; it is needed only when a product can leave a type's range.
    factor = max([1.0, *(abs(scaling.scaling) for scaling in reading.scalings.values())])
    held = {t.dtype for pair in pairs.values() for t in (pair.lora_a, pair.lora_b)}
    if any(largest * factor > torch.finfo(kind).max for kind in held):
        reading.problems += checks.check_overflow(pairs)
    # A cast to a narrow type can turn the smallest values into zero.
    if experts is None and not any(_may_change(part) for part in parts.values()):
        reading.problems.append(checks.no_effect(f"zero in every pair when held in {dtype}"))
    if reading.problems:
        return
    reading.adapter = Adapter(
        config=config,
        parts=MappingProxyType(parts),
        digest=reading.digest,
        source=reading.files.source,
        base_copies=MappingProxyType(assembler.base_copies()),
        experts=experts,
        num_tensors=len(reading.tensors.entries) if reading.tensors else 0,
        skipped=reading.inventory.skipped,
    )


def _may_change(part: ModulePart) -> bool:
    """Return whether a part holds anything besides a pair, or a pair that is not zero."""
    pair = part.pair
    if pair is None or part.nbytes != pair.nbytes:
        return True
    return bool(pair.lora_a.any()) and bool(pair.lora_b.any())
