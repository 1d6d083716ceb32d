"""Adapter folders on this machine: a path, ``~``, or ``file://``. Looks nothing up remotely."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from lora_weights.errors import AdapterNotFoundError, SourceError
from lora_weights.fields import CONFIG_FILE

if TYPE_CHECKING:
    from collections.abc import Sequence

WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Names of weight files, in the order in which they are searched."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+://")
_SHARD = re.compile(r"adapter_model(-\d+-of-\d+\.\w+|\.\w+\.index\.json)")
_MAX_LISTED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """The files of one adapter folder."""

    source: str
    """What is shown as the adapter's origin: an absolute folder, or an address."""
    folder: Path
    """Absolute, links not resolved."""
    config: Path
    """The ``adapter_config.json``."""
    weights: Path | None
    """The first weight file there is, or None."""
    shards: tuple[str, ...]
    """Names that belong to a checkpoint in several files."""


def resolve_folder(source: str | os.PathLike[str]) -> Path:
    """Return the absolute folder a source names.

    Args:
        source: a path (``~`` allowed, relative to the working directory) or a ``file://`` address.

    Raises:
        AdapterNotFoundError: the path is empty or names the home of an unknown user.
        SourceError: the source has another scheme or another host.
    """
    text = os.fspath(source)
    if not text:
        raise AdapterNotFoundError(source=text, reason="the path is empty")
    if _SCHEME.match(text):
        parts = urlsplit(text)
        if parts.scheme.lower() != "file" or parts.netloc not in ("", "localhost"):
            reason = "only folders on this machine (a path or file:///path) can be read"
            raise SourceError(source=text, reason=reason)
        text = unquote(parts.path)
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # ~name of a user this machine does not have
        raise AdapterNotFoundError(source=text, reason=str(error)) from error


def find_files(source: str | os.PathLike[str]) -> AdapterFiles:
    """Find configuration and weights of an adapter.

    Args:
        source: as for `resolve_folder`.

    Raises:
        AdapterNotFoundError: there is no folder, or no ``adapter_config.json`` in it.
        SourceError: the source is not on this machine.
        OSError: the folder cannot be listed.
    """
    name = os.fspath(source)
    folder = resolve_folder(source)
    if not folder.is_dir():
        raise AdapterNotFoundError(source=name, reason=_no_folder(folder))
    names = sorted(entry.name for entry in folder.iterdir())
    if not (folder / CONFIG_FILE).is_file():
        raise AdapterNotFoundError(source=name, reason=_no_config(folder, names))
    weights = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    shards = tuple(name for name in names if _SHARD.fullmatch(name))
    return AdapterFiles(
        source=str(folder),
        folder=folder,
        config=folder / CONFIG_FILE,
        weights=weights,
        shards=shards,
    )


def _no_folder(folder: Path) -> str:
    if folder.exists():
        return f"{folder} is a file; the folder that holds {CONFIG_FILE} is needed"
    return f"there is no folder {folder}"


def _no_config(folder: Path, names: Sequence[str]) -> str:
    """Say what is there instead of a configuration, with a hint where the adapter may be."""
    if not names:
        return f"{folder} is empty, expected {CONFIG_FILE} and {WEIGHT_FILES[0]}"
    listed = ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
    deeper = [name for name in names if (folder / name / CONFIG_FILE).is_file()]
    hint = f"; there is one in the sub-folder {', '.join(deeper)}" if deeper else ""
    return f"{folder} holds no {CONFIG_FILE} (it holds {listed}){hint}"
