"""Hugging Face ids: what the hub says about a repository. The files come over plain HTTP.

The hub's own client resolves the revision, knows the token, and has the offline mode; it would
neither bound a download nor continue one that another call began.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lora_weights.errors import AdapterNotFoundError, SourceError
from lora_weights.fields import CONFIG_FILE
from lora_weights.sources.http import TIMEOUT_S, HttpStore
from lora_weights.sources.storage_options import text_option

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from lora_weights.sources.address import Address
    from lora_weights.sources.store import RemoteStream

OPTIONS = ("endpoint", "token")
"""Storage options of the hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubStore:
    """One commit of a repository."""

    commit: str
    """The commit that the revision named."""
    names: tuple[str, ...]
    """File names in the folder; deeper ones as far as they are configurations."""
    files: HttpStore
    """The files of the commit."""

    def list_names(self) -> tuple[str, ...]:
        """Return the names in the folder."""
        return self.names

    def open(
        self,
        name: str,
        *,
        start: int = 0,
        version: str | None = None,
        length: int | None = None,
        known: str | None = None,
    ) -> AbstractContextManager[RemoteStream]:
        """Open a file; as `RemoteStore.open`."""
        return self.files.open(name, start=start, version=version, length=length, known=known)


def import_hub(shown: str) -> Any:
    """Return the hub's client.

    Args:
        shown: the source in the caller's words.

    Raises:
        SourceError: it is not installed.
        AdapterNotFoundError: it is not installed, and the source may have been meant as a path.
    """
    try:
        # By name, as the extra may be absent; its parts are not there before they are imported.
        for part in ("constants", "errors", "utils"):
            import_module(f"huggingface_hub.{part}")
        return import_module("huggingface_hub")
    except ImportError as error:
        reason = "Hugging Face ids need the extra 'hub' (lora-weights[hub])"
        if "://" in shown:
            raise SourceError(source=shown, reason=reason) from error
        reason = f"there is no folder {shown}; {reason}"
        raise AdapterNotFoundError(source=shown, reason=reason) from error


def offline_folder(hub: Any, address: Address) -> Path | None:
    """Return the folder in the hub client's own cache when the client is offline, else None.

    Raises:
        AdapterNotFoundError: it is offline and the repository is not in its cache.
    """
    if not hub.constants.HF_HUB_OFFLINE:
        return None
    try:
        folder = hub.snapshot_download(
            address.location, revision=address.revision, local_files_only=True
        )
    except FileNotFoundError as error:
        reason = "the hub client is offline (HF_HUB_OFFLINE) and its cache has no such repository"
        raise AdapterNotFoundError(source=address.shown, reason=reason) from error
    return Path(folder) / address.subfolder


def resolve_hub(hub: Any, address: Address, options: Mapping[str, object]) -> HubStore:
    """Ask the hub for the commit of a revision and its files.

    Args:
        hub: the client, from `import_hub`.
        address: a hub address.
        options: ``endpoint`` and ``token``; absent are the client's own. The token False is none.

    Raises:
        AdapterNotFoundError: there is no such repository or revision, or it is private.
        Exception: whatever the client raises.
    """
    endpoint = text_option(options, "endpoint") or hub.constants.ENDPOINT
    token = False if options.get("token") is False else text_option(options, "token")
    client = hub.HfApi(endpoint=endpoint, token=token)
    try:
        info = client.model_info(address.location, revision=address.revision, timeout=TIMEOUT_S)
    except hub.errors.GatedRepoError:
        raise
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError) as error:
        what = f"{address.location} at {address.revision or 'its main branch'}"
        reason = f"{endpoint} has no repository {what}, or it is private and the token is not right"
        raise AdapterNotFoundError(source=address.shown, reason=reason) from error
    prefix = f"{address.subfolder}/" if address.subfolder else ""
    files = (entry.rfilename for entry in info.siblings or ())
    names = tuple(sorted(_below(files, prefix)))
    folder = f"{endpoint}/{address.location}/resolve/{info.sha}/{quote(prefix)}".rstrip("/")
    headers = hub.utils.build_hf_headers(token=token, library_name="lora-weights")
    return HubStore(commit=info.sha, names=names, files=HttpStore(folder, headers=headers))


def _below(files: Iterator[str], prefix: str) -> Iterator[str]:
    """Yield names in a folder, and configurations one or two levels below it."""
    for file in files:
        name = file.removeprefix(prefix)
        if file.startswith(prefix) and ("/" not in name or name.endswith(f"/{CONFIG_FILE}")):
            yield name
