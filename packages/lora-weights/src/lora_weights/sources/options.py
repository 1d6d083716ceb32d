"""How a remote source may be fetched. Knows no protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

DEFAULT_MAX_BYTES = 20 * 2**30
"""Most bytes one adapter may have; larger than any adapter of today's models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """What a caller says about reading a source."""

    cache_dir: str | os.PathLike[str] | None = None
    """Folder for what is downloaded; None is ``.cache/lora-weights`` in the home folder."""
    max_bytes: int = DEFAULT_MAX_BYTES
    """Most bytes the files of one adapter may have together."""
    storage_options: Mapping[str, object] = field(default_factory=dict, repr=False)
    """Passed to the storage: credentials, endpoints. Never shown."""

    def __post_init__(self) -> None:
        if self.max_bytes < 1:
            raise ValueError(f"max_bytes is {self.max_bytes}, expected at least 1")

    @property
    def cache_folder(self) -> Path:
        """Where downloads go. Not created here."""
        if self.cache_dir is None:
            return Path.home() / ".cache" / "lora-weights"
        return Path(self.cache_dir).expanduser().absolute()
