"""Renaming rules and skipped prefixes that the caller gives for one load.

Applied to module paths after PEFT's prefix is gone. Rank and alpha patterns are still matched
against the names of the file. Knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Renaming:
    """What a caller wants module paths to be called, and which to leave out.

    Prefixes are whole components: ``mtp`` and ``mtp.`` match ``mtp.layers``, not ``mtpx``. An
    empty prefix matches every path.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    """Prefix -> what stands in its place. Rules that disagree on a path are an error."""
    skip_prefixes: Sequence[str] = ()
    """Prefixes of paths whose tensors are left out and listed."""

    def is_skipped(self, path: str) -> bool:
        """Return whether a path is to be left out."""
        return any(_rest(path, prefix) is not None for prefix in self.skip_prefixes)

    def new_names(self, path: str) -> list[str]:
        """Return what a path is to be called: one name, or several when rules disagree."""
        names = {}
        for prefix, new in self.rename.items():
            rest = _rest(path, prefix)
            if rest is not None:
                names[".".join(part for part in (new.rstrip("."), rest) if part)] = prefix
        return list(names) or [path]


def _rest(path: str, prefix: str) -> str | None:
    """Return what follows a prefix of whole components, or None."""
    prefix = prefix.rstrip(".")
    if not prefix or path == prefix:
        return path[len(prefix) :]
    return path.removeprefix(f"{prefix}.") if path.startswith(f"{prefix}.") else None
