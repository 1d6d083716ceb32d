"""Where adapters may be loaded from while the service runs.

A path is followed through links and `..` first and compared afterwards, so that neither can lead
out of a root; nor can a link in the folder that is found.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lora_server.errors import PathNotAllowedError, RuntimeLoadingDisabledError

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_LISTED = 10


class AdapterRoots:
    """The folders below which `POST /v1/load_lora_adapter` may read."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = tuple(Path(root).expanduser().resolve() for root in roots)

    def resolve(self, path: str) -> Path:
        """The real folder a client's path leads to; it need not exist.

        A relative path is tried below each root in turn, then from the working folder.

        Raises:
            RuntimeLoadingDisabledError: no root is configured.
            PathNotAllowedError: the folder, or a file that is linked from it, lies outside every
                root.
        """
        if not self._roots:
            raise RuntimeLoadingDisabledError(
                "adapters cannot be loaded over HTTP: the server was started without --adapter-root"
                " or --lora-dir",
                param="lora_path",
            )
        if "\0" in path:
            raise PathNotAllowedError("the path holds a NUL character", param="lora_path")
        given = Path(path.removeprefix("file://")).expanduser()
        candidates = [given] if given.is_absolute() else [r / given for r in self._roots]
        candidates.append(Path.cwd() / given)
        allowed = [real for real in map(_real, candidates) if self._is_below_root(real)]
        if not allowed:
            raise PathNotAllowedError(
                f"{path!r} lies outside the folders that adapters may be loaded from",
                param="lora_path",
            )
        folder = next((real for real in allowed if real.exists()), allowed[0])
        self._check_links(folder)
        return folder

    def _check_links(self, folder: Path) -> None:
        """Refuse a folder whose files lie elsewhere; adapters have no files in deeper folders."""
        try:
            entries = sorted(folder.iterdir())
        except OSError:  # not there, or not a folder, which its reader says better
            return
        outside = [e.name for e in entries if e.is_symlink() and not self._is_below_root(_real(e))]
        if outside:
            listed = ", ".join(map(repr, outside[:_MAX_LISTED]))
            raise PathNotAllowedError(
                f"{str(folder)!r} holds links that lead out of the folders that adapters may be "
                f"loaded from: {listed}",
                param="lora_path",
            )

    def _is_below_root(self, real: Path) -> bool:
        return any(real.is_relative_to(root) for root in self._roots)


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise PathNotAllowedError(f"{path.name!r}: {error}", param="lora_path") from error
