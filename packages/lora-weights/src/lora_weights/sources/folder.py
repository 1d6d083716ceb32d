"""Adapter folders on this machine: a path, ``~``, or ``file://``. Looks nothing up remotely."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from lora_weights.errors import AdapterNotFoundError
from lora_weights.fields import CONFIG_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

INDEX_FILE = "adapter_model.safetensors.index.json"
"""The index of a checkpoint in several files."""

WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Names of weight files, in the order in which they are searched."""

PICKLE_SUFFIXES = (".bin", ".pt")
"""Endings of weight files that are pickles."""

_MAX_LISTED = 12
_MAX_SEARCHED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """The files of one adapter, readable on this machine."""

    source: str
    """What is shown as the adapter's origin: an absolute folder, or an address."""
    paths: Mapping[str, Path] = field(repr=False)
    """File name -> where it can be read. Links are not resolved."""
    names: tuple[str, ...] = ()
    """Everything that lies beside the adapter, sorted; of a source that cannot be listed, what is
    known."""

    @property
    def config(self) -> Path:
        """The ``adapter_config.json``."""
        return self.paths[CONFIG_FILE]

    @property
    def weights(self) -> Path | None:
        """The first weight file there is, the index of several included; None without any."""
        first, *pickles = WEIGHT_FILES
        return next((self.paths[n] for n in (first, INDEX_FILE, *pickles) if n in self.paths), None)

    @property
    def shards(self) -> tuple[str, ...]:
        """Names that look like parts of a checkpoint in several files."""
        return tuple(name for name in self.names if is_shard_name(name))


def is_shard_name(name: str) -> bool:
    """Return whether a name is usual for a part, or the index, of a checkpoint in several files."""
    if not name.startswith("adapter_model"):
        return False
    return name.endswith(".index.json") or (name[13:14] == "-" and "-of-" in name)


def resolve_folder(location: str | os.PathLike[str]) -> Path:
    """Return the absolute folder a path names.

    Args:
        location: a path; ``~`` allowed, relative to the working directory.

    Raises:
        AdapterNotFoundError: the path names the home of an unknown user.
    """
    try:
        return Path(location).expanduser().absolute()
    except RuntimeError as error:  # ~name of a user this machine does not have
        raise AdapterNotFoundError(source=os.fspath(location), reason=str(error)) from error


def find_files(location: str | os.PathLike[str], *, shown: str | None = None) -> AdapterFiles:
    """Find configuration and weights of an adapter.

    Args:
        location: as for `resolve_folder`.
        shown: the source in the caller's words, for errors; None is the location.

    Raises:
        AdapterNotFoundError: there is no folder, or no ``adapter_config.json`` in it.
        OSError: the folder cannot be listed.
    """
    source = os.fspath(location) if shown is None else shown
    folder = resolve_folder(location)
    if not folder.is_dir():
        raise AdapterNotFoundError(source=source, reason=_no_folder(folder))
    with os.scandir(folder) as entries:
        kinds = {entry.name: entry.is_file() for entry in entries}
    names = tuple(sorted(kinds))
    paths = {name: folder / name for name in names if kinds[name]}
    if CONFIG_FILE not in paths:
        deeper = adapters_below(folder)
        reason = no_config(str(folder), names, deeper, is_link=(folder / CONFIG_FILE).is_symlink())
        raise AdapterNotFoundError(source=source, reason=reason)
    return AdapterFiles(source=str(folder), paths=MappingProxyType(paths), names=names)


def adapters_below(folder: Path) -> list[str]:
    """Return the sub-folders, one or two levels down, that hold an adapter.

    PEFT saves an adapter with a name of its own one level down, trainers save checkpoints, and
    both together are two levels.
    """
    found, level = [], [(folder, "")]
    for _ in range(2):
        below = []
        for parent, prefix in level:
            for path in _folders(parent)[: _MAX_SEARCHED // len(level) + 1]:
                name = f"{prefix}{path.name}"
                if (path / CONFIG_FILE).is_file():
                    found.append(name)
                below.append((path, f"{name}/"))
        level = below[:_MAX_SEARCHED]
    return sorted(found)


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(folder / entry.name for entry in entries if entry.is_dir())
    except OSError:  # a folder this user may not list gives no hint
        return []


def _no_folder(folder: Path) -> str:
    if folder.exists():
        return f"{folder} is a file; the folder that holds {CONFIG_FILE} is needed"
    if folder.is_symlink():
        return f"{folder} is a link to {folder.readlink()}, which is not there"
    return f"there is no folder {folder}"


def no_config(
    place: str, names: Sequence[str], deeper: Sequence[str], *, is_link: bool = False
) -> str:
    """Say what is there instead of a configuration, with a hint where the adapter may be.

    Args:
        place: the folder, as it is shown.
        names: what it holds.
        deeper: its sub-folders that hold an adapter.
        is_link: whether the configuration is a link that leads nowhere.
    """
    if not names:
        return f"{place} is empty, expected {CONFIG_FILE} and {WEIGHT_FILES[0]}"
    if is_link:
        return f"{CONFIG_FILE} in {place} is a link to something that is not there"
    text = f"{place} holds no {CONFIG_FILE} (it holds {listed(names)})"
    if deeper:
        where = "is one in the sub-folder" if len(deeper) == 1 else "are some in the sub-folders"
        return f"{text}; there {where} {listed(deeper)}"
    model = full_model_files(names)
    if model:
        return f"{text}; {model[0]} belongs to a full model, and what is needed is an adapter"
    if any(name in WEIGHT_FILES for name in names):
        return f"{text}; the weights alone do not say how they are scaled"
    return text


def full_model_files(names: Iterable[str]) -> list[str]:
    """Return those of some file names that a whole model's checkpoint has."""
    starts = ("model.safetensors", "model-0", "pytorch_model", "consolidated.", "tf_model")
    return [name for name in names if name.startswith(starts) or name.endswith(".gguf")]


def listed(names: Sequence[str], limit: int = _MAX_LISTED) -> str:
    """Return names as text, cut when there are many; odd characters are written as escapes."""
    shown = [name if name.isprintable() else ascii(name) for name in names[:limit]]
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(shown) + rest
