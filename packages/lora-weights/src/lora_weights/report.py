"""``inspect_adapter``: what is in an adapter folder and what stands in its way, as one report.

The engine of the doctor. Bad content never raises; it is in the report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_weights.advice import warnings_of
from lora_weights.errors import (
    AdapterNotFoundError,
    Problem,
    ProblemCode,
    SourceError,
    UnsafeFormatError,
)
from lora_weights.load import read_adapter
from lora_weights.sources.address import shown_source
from lora_weights.sources.options import DEFAULT_MAX_BYTES, FetchOptions
from lora_weights.summary import ModuleSummary, summarize

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import torch

    from lora_weights.adapter import Adapter
    from lora_weights.config import AdapterConfig


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
    """All modules that the file has tensors for, sorted by path."""
    numbers_read: bool
    """Whether tensors were read, and not only their names and shapes. Otherwise no problems means
    only that a header shows none."""
    num_tensors: int
    """Tensors in the weight file; 0 when it cannot be read."""
    weights_bytes: int
    """Bytes of the tensors in the file."""

    @property
    def is_loadable(self) -> bool:
        """Whether `load_adapter` with the same arguments succeeds; false after headers alone."""
        return self.adapter is not None

    @property
    def digest(self) -> str | None:
        """The adapter's digest, when it can be loaded."""
        return None if self.adapter is None else self.adapter.digest

    @property
    def base_model(self) -> str | None:
        """The base in the trainer's words: untrusted text, shown and never opened."""
        return None if self.config is None else self.config.base_model_name_or_path

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
        warnings=tuple(warnings_of(reading)),
        config=reading.config,
        modules=tuple(summarize(reading)),
        numbers_read=reading.tensors is not None and reading.tensors.has_numbers,
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
        numbers_read=False,
        num_tensors=0,
        weights_bytes=0,
    )
