"""A source -> local files for as long as they are read. The one door to all kinds of sources."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from lora_weights.errors import AdapterError, AdapterNotFoundError, SourceError
from lora_weights.sources.address import Address, SourceKind, parse_address
from lora_weights.sources.cache import SourceCache
from lora_weights.sources.fetch import Fetcher
from lora_weights.sources.folder import find_files
from lora_weights.sources.http import TIMEOUT_S, HttpStore
from lora_weights.sources.hub import OPTIONS as HUB_OPTIONS
from lora_weights.sources.hub import import_hub, offline_folder, resolve_hub
from lora_weights.sources.objects import ObjectStore
from lora_weights.sources.remote import fetch_adapter
from lora_weights.sources.storage_options import (
    check_options,
    header_option,
    number_option,
    secrets_of,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping

    from lora_weights.sources.folder import AdapterFiles
    from lora_weights.sources.options import FetchOptions
    from lora_weights.sources.store import RemoteStore

HTTP_OPTIONS = ("headers", "timeout_s")
"""Storage options of web addresses."""

_MAX_REASON = 500


class OpenedSource:
    """The files of a source, and whether what was downloaded for them may stay."""

    def __init__(self, files: AdapterFiles, fetcher: Fetcher | None = None) -> None:
        self.files = files
        """Where the files lie."""
        self._fetcher = fetcher

    def keep(self) -> None:
        """Say that the adapter is good: its downloads stay in the cache."""
        if self._fetcher is not None:
            self._fetcher.keep()


@contextmanager
def open_source(
    source: str | os.PathLike[str],
    options: FetchOptions,
    *,
    allow_pickle: bool,
    read_tensors: bool,
) -> Iterator[OpenedSource]:
    """Make the files of a source readable on this machine.

    Args:
        source: as for `parse_address`.
        options: cache, bounds and credentials of remote sources.
        allow_pickle: fetch ``.bin`` and ``.pt`` files too.
        read_tensors: fetch the numbers too, and not only the headers.

    Yields:
        The files. They are there until the end of the block; what was downloaded in it stays
        only when `OpenedSource.keep` was called.

    Raises:
        AdapterNotFoundError: there is no adapter at the source.
        UnsafeFormatError: a remote source has only pickled weights, and they are not allowed.
        SourceError: it cannot be read; the original error is the cause, unless its text holds
            credentials.
        OSError: a folder of this machine cannot be listed.
    """
    address = parse_address(source)
    if address.kind is SourceKind.FOLDER:
        yield OpenedSource(find_files(address.location, shown=address.shown))
        return
    with ExitStack() as stack:
        with _as_source_error(address, options.storage_options):
            opened = _fetch(
                stack, address, options, allow_pickle=allow_pickle, read_tensors=read_tensors
            )
        yield opened


def _fetch(
    stack: ExitStack,
    address: Address,
    options: FetchOptions,
    *,
    allow_pickle: bool,
    read_tensors: bool,
) -> OpenedSource:
    """Download the files of a remote source; `stack` undoes what must not stay."""
    origin = address.shown
    store: RemoteStore
    match address.kind:
        case SourceKind.HUB:
            hub = import_hub(address.shown)
            folder = offline_folder(hub, address)
            if folder is not None:
                return OpenedSource(find_files(folder, shown=address.shown))
            check_options(options.storage_options, HUB_OPTIONS)
            store = resolve_hub(hub, address, options.storage_options)
            origin = f"hf://{address.location}@{store.commit}"
            origin += f"/{address.subfolder}" if address.subfolder else ""
        case SourceKind.HTTP:
            store = _http_store(address, options.storage_options)
        case _:
            store = ObjectStore(address.location, options.storage_options)
    cache = SourceCache(options.cache_folder, _identity(address, options.storage_options))
    stack.enter_context(cache.locked(address.shown))
    fetcher = stack.enter_context(Fetcher(store, cache, max_bytes=options.max_bytes))
    scratch = None if read_tensors else stack.enter_context(cache.scratch())
    files = fetch_adapter(
        fetcher,
        shown=address.shown,
        origin=origin,
        names=_list_names(store, address.shown),
        allow_pickle=allow_pickle,
        scratch=scratch,
    )
    return OpenedSource(files, fetcher)


def _http_store(address: Address, options: Mapping[str, object]) -> HttpStore:
    check_options(options, HTTP_OPTIONS)
    return HttpStore(
        address.location,
        query=address.query,
        user=address.user,
        headers=header_option(options, "headers"),
        timeout_s=number_option(options, "timeout_s", TIMEOUT_S),
    )


def _list_names(store: RemoteStore, shown: str) -> tuple[str, ...] | None:
    """Return what a folder holds; None where it cannot, or may not, be listed."""
    try:
        return store.list_names()
    except PermissionError:
        # Reading single objects is often allowed where listing is not.
        return None
    except FileNotFoundError as error:
        raise AdapterNotFoundError(source=shown, reason=f"there is nothing ({error})") from error


def _identity(address: Address, options: Mapping[str, object]) -> str:
    """Return what tells a source's downloads from others; no credentials."""
    endpoints = sorted(_endpoints(options))
    return "\n".join(
        [address.kind, address.location, address.revision or "", address.subfolder, *endpoints]
    )


def _endpoints(options: Mapping[str, object]) -> Iterator[str]:
    """Yield the endpoints among the options, however deep."""
    for key, value in options.items():
        if isinstance(value, dict):
            yield from _endpoints(value)
        elif "endpoint" in key and isinstance(value, str):
            yield value


@contextmanager
def _as_source_error(address: Address, options: Mapping[str, object]) -> Iterator[None]:
    """Turn whatever a storage raises into one error that shows no credentials."""
    try:
        yield
    except AdapterError:
        raise
    except Exception as error:  # noqa: BLE001 - every storage has errors of its own
        secrets = set(_secrets(address, options))
        reason = str(error).strip() or type(error).__name__
        for secret in sorted(secrets, key=len, reverse=True):
            reason = reason.replace(secret, "***")
        cause = None if _shows(error, secrets) else error
        raise SourceError(source=address.shown, reason=reason[:_MAX_REASON]) from cause


def _secrets(address: Address, options: Mapping[str, object]) -> Iterator[str]:
    """Yield every text that must not be shown."""
    yield from secrets_of([*(address.user or ()), address.query])
    yield from secrets_of([value for _, value in parse_qsl(address.query)])
    endpoints = set(_endpoints(options))
    yield from (secret for secret in secrets_of(dict(options)) if secret not in endpoints)


def _shows(error: BaseException | None, secrets: Iterable[str]) -> bool:
    """Return whether a secret is in the text of an error or of those behind it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if any(secret in f"{error} {error!r}" for secret in secrets):
            return True
        error = error.__cause__ or error.__context__
    return False
