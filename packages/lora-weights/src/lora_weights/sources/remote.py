"""Which files of a remote folder an adapter needs, and their download."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from lora_weights.errors import AdapterNotFoundError, UnsafeFormatError
from lora_weights.fields import CONFIG_FILE
from lora_weights.json_object import MAX_JSON_BYTES
from lora_weights.shards import parse_index
from lora_weights.sources.folder import (
    INDEX_FILE,
    WEIGHT_FILES,
    AdapterFiles,
    no_config,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lora_weights.sources.fetch import Fetcher


def fetch_adapter(
    fetcher: Fetcher,
    *,
    shown: str,
    origin: str,
    names: tuple[str, ...] | None,
    allow_pickle: bool,
    scratch: Path | None,
) -> AdapterFiles:
    """Download configuration and weights of an adapter, and nothing else.

    Args:
        fetcher: downloads single files.
        shown: the source in the caller's words, for errors.
        origin: the source as exactly as it is known, for records.
        names: what the folder holds; None when it cannot be listed.
        allow_pickle: download ``.bin`` and ``.pt`` files.
        scratch: folder for headers, when only those are wanted; None downloads whole files.

    Raises:
        AdapterNotFoundError: there is no ``adapter_config.json``.
        UnsafeFormatError: the only weights are a pickle file and `allow_pickle` is false.
        Exception: whatever the storage raises.
    """
    wanted = _Wanted(fetcher, shown, names, scratch, allow_pickle=allow_pickle)
    if not wanted.take(CONFIG_FILE, fetcher.fetch):
        raise AdapterNotFoundError(source=shown, reason=_no_config(shown, names))
    single, *pickles = WEIGHT_FILES
    if not wanted.take(single, wanted.weights):
        if wanted.take(INDEX_FILE, fetcher.fetch):
            for shard in _shards(wanted.paths[INDEX_FILE]):
                wanted.take(shard, wanted.weights)
        else:
            any(wanted.take(name, wanted.pickle) for name in pickles)
    paths = wanted.paths
    return AdapterFiles(
        source=origin,
        paths=MappingProxyType(paths),
        names=tuple(sorted(paths)) if names is None else names,
    )


class _Wanted:
    """The files gotten so far, and how each kind is gotten."""

    def __init__(
        self,
        fetcher: Fetcher,
        shown: str,
        names: tuple[str, ...] | None,
        scratch: Path | None,
        *,
        allow_pickle: bool,
    ) -> None:
        self.paths: dict[str, Path] = {}
        self._fetcher = fetcher
        self._shown = shown
        self._names = names
        self._scratch = scratch
        self._allow_pickle = allow_pickle

    def take(self, name: str, get: Callable[[str], Path]) -> bool:
        """Get one file; return whether there is one."""
        if self._names is not None and name not in self._names:
            return False
        try:
            self.paths[name] = get(name)
        except FileNotFoundError:
            return False
        return True

    def weights(self, name: str) -> Path:
        """Get a safetensors file, or its header."""
        if self._scratch is None:
            return self._fetcher.fetch(name)
        return self._fetcher.fetch_front(name, self._scratch)

    def pickle(self, name: str) -> Path:
        """Get a pickle where it may be read; of a header nothing can be had."""
        if self._allow_pickle and self._scratch is None:
            return self._fetcher.fetch(name)
        self._fetcher.check_exists(name)
        if not self._allow_pickle:
            raise UnsafeFormatError(source=self._shown, file_name=name)
        assert self._scratch is not None
        return self._scratch / name


def _shards(index: Path) -> list[str]:
    """Return the files an index names; none when it is no index, which its reader will say."""
    if index.stat().st_size > MAX_JSON_BYTES:
        return []
    table, _ = parse_index(index.read_bytes())
    return sorted(set(table.values()))


def _no_config(shown: str, names: tuple[str, ...] | None) -> str:
    if names is None:
        return f"there is no {CONFIG_FILE} in {shown}"
    deeper = [name.removesuffix(f"/{CONFIG_FILE}") for name in names if "/" in name]
    return no_config(shown, [name for name in names if "/" not in name], deeper)
