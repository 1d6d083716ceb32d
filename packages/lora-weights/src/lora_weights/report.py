"""``inspect_adapter``: what is in an adapter folder and what stands in its way, as one report.

The engine of the doctor. Bad content never raises; it is in the report.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_weights.errors import (
    AdapterNotFoundError,
    Problem,
    ProblemCode,
    SourceError,
    UnsafeFormatError,
)
from lora_weights.fields import CONFIG_FILE
from lora_weights.load import Reading, read_adapter
from lora_weights.scaling import pattern_fault
from lora_weights.sources.address import shown_source
from lora_weights.sources.options import DEFAULT_MAX_BYTES, FetchOptions

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from lora_weights.adapter import Adapter
    from lora_weights.config import AdapterConfig
    from lora_weights.inventory import PairEntries
    from lora_weights.sources.folder import AdapterFiles

_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSummary:
    """One module's pair in a report."""

    module: str
    """Module path without PEFT's prefix."""
    rank: int
    """Rank by the configuration."""
    scaling: float
    """Factor of ``B A``."""
    shape_a: tuple[int, ...]
    """Stored shape of A."""
    shape_b: tuple[int, ...]
    """Stored shape of B."""
    dtype: str
    """Stored type of B, such as BF16."""
    is_embedding: bool
    """Whether it is the pair of an embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReport:
    """What `inspect_adapter` found."""

    source: str
    """The source as given."""
    adapter: Adapter | None
    """The adapter, when it can be loaded."""
    problems: tuple[Problem, ...]
    """Every reason why it cannot; the same list that `load_adapter` raises."""
    warnings: tuple[str, ...]
    """What works and may surprise, one sentence each."""
    config: AdapterConfig | None
    """The configuration, when rank and alpha could be told."""
    modules: tuple[ModuleSummary, ...]
    """All modules with a whole pair, sorted by path."""
    num_tensors: int
    """Tensors in the weight file; 0 when it cannot be read."""
    weights_bytes: int
    """Bytes of the tensors in the file."""

    @property
    def is_loadable(self) -> bool:
        """Whether `load_adapter` with the same arguments succeeds."""
        return self.adapter is not None

    @property
    def digest(self) -> str | None:
        """The adapter's digest, when it can be loaded."""
        return None if self.adapter is None else self.adapter.digest

    @property
    def rank(self) -> int:
        """Largest rank of any module; 0 when none was found."""
        return max((summary.rank for summary in self.modules), default=0)


def inspect_adapter(
    source: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_rank: int | None = None,
    allow_pickle: bool = False,
    read_tensors: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    storage_options: Mapping[str, object] | None = None,
) -> AdapterReport:
    """Read an adapter and report what is in it.

    Args:
        source: as for `load_adapter`; a missing folder is reported too.
        dtype: as for `load_adapter`.
        max_rank: as for `load_adapter`.
        allow_pickle: as for `load_adapter`.
        read_tensors: read the numbers too. Without them the report rests on the configuration and
            the headers of the weight files; no tensor data is read, and nothing says that the
            numbers are finite or have an effect.
        cache_dir: as for `load_adapter`.
        max_bytes: as for `load_adapter`.
        storage_options: as for `load_adapter`.

    Raises:
        ValueError: `dtype`, `max_rank` or `max_bytes` is not one that can be asked for.
    """
    fetch = FetchOptions(
        cache_dir=cache_dir, max_bytes=max_bytes, storage_options=storage_options or {}
    )
    try:
        reading = read_adapter(
            source,
            dtype=dtype,
            max_rank=max_rank,
            allow_pickle=allow_pickle,
            fetch=fetch,
            read_tensors=read_tensors,
        )
    except (AdapterNotFoundError, SourceError, UnsafeFormatError) as error:
        return _unread(shown_source(source), error)
    return AdapterReport(
        source=shown_source(source),
        adapter=reading.adapter,
        problems=tuple(reading.problems),
        warnings=tuple(_warnings(reading)),
        config=reading.config,
        modules=tuple(_summaries(reading)),
        num_tensors=len(reading.tensors.entries) if reading.tensors else 0,
        weights_bytes=reading.tensors.nbytes if reading.tensors else 0,
    )


def _unread(
    source: str, error: AdapterNotFoundError | SourceError | UnsafeFormatError
) -> AdapterReport:
    """Return the report on a source that could not be read."""
    if isinstance(error, UnsafeFormatError):
        code, found = ProblemCode.UNSAFE_FORMAT, f"only in {error.file_name}, a pickle file"
        problem = Problem(
            code=code, tensor="the weights", found=found, expected="adapter_model.safetensors"
        )
    else:
        is_missing = isinstance(error, AdapterNotFoundError)
        code = ProblemCode.NOT_FOUND if is_missing else ProblemCode.UNREADABLE
        found = f"{'not there' if is_missing else 'not readable'}: {error.reason}"
        problem = Problem(code=code, found=found)
    return AdapterReport(
        source=source,
        adapter=None,
        problems=(problem,),
        warnings=(),
        config=None,
        modules=(),
        num_tensors=0,
        weights_bytes=0,
    )


def _summaries(reading: Reading) -> Iterator[ModuleSummary]:
    for pair in reading.inventory.pairs if reading.inventory else ():
        scaling = reading.scalings[pair.module]
        yield ModuleSummary(
            module=pair.module,
            rank=scaling.rank,
            scaling=scaling.scaling,
            shape_a=pair.lora_a.shape,
            shape_b=pair.lora_b.shape,
            dtype=pair.lora_b.dtype,
            is_embedding=pair.is_embedding,
        )


def _warnings(reading: Reading) -> Iterator[str]:
    yield from _file_warnings(reading.files)
    config, inventory = reading.config, reading.inventory
    if config is None:
        return
    if config.init_lora_weights == "lora_ga":
        yield (
            "LoRA-GA changes the base weight when training starts; unless the adapter was "
            "converted when it was saved, it belongs to that changed base"
        )
    if inventory is None:
        return
    yield from _target_warnings(config, inventory.pairs)
    if inventory.base_copies:
        names = ", ".join(inventory.base_copies)
        yield f"the file holds copies of base weights ({names}), which must equal the base's"


def _file_warnings(files: AdapterFiles) -> Iterator[str]:
    present = [name for name in _TOKENIZER_FILES if name in files.names]
    if present:
        yield f"the adapter's own tokenizer and chat template are not used ({', '.join(present)})"
    if "non_lora_trainables.bin" in files.names:
        yield "non_lora_trainables.bin holds further trained weights, which are not read"


def _target_warnings(config: AdapterConfig, pairs: Sequence[PairEntries]) -> Iterator[str]:
    """Say where the configuration's target_modules and the tensors disagree."""
    targets = config.target_modules
    if targets is None or targets == "all-linear":
        return
    modules = [pair.module for pair in pairs]
    if isinstance(targets, str):
        outside = _outside_pattern(targets, modules)
    else:
        outside = [m for m in modules if not any(_is_target(m, name) for name in targets)]
        unused = [name for name in targets if not any(_is_target(m, name) for m in modules)]
        if unused:
            yield f"{CONFIG_FILE} target_modules names modules without tensors: {_listed(unused)}"
    if outside:
        yield f"the file adapts modules outside {CONFIG_FILE} target_modules: {_listed(outside)}"


def _is_target(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _outside_pattern(pattern: str, modules: Sequence[str]) -> list[str]:
    """Return the modules a target pattern does not match; none when it is no safe pattern."""
    if pattern_fault(pattern) is not None:
        return []
    expression = re.compile(pattern)
    return [module for module in modules if not expression.fullmatch(module)]


def _listed(names: Sequence[str], limit: int = 6) -> str:
    return ", ".join(names[:limit]) + (
        f" and {len(names) - limit} more" if len(names) > limit else ""
    )
