"""What a source string names: a folder, an object store, a web address, a hub id.

Opens nothing and asks nobody: which of them it is follows from the text, and for ``owner/name``
from what lies in the working directory.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from lora_weights.errors import AdapterNotFoundError, SourceError

SCHEMES = ("file://", "s3://", "gs://", "https://", "http://", "hf://")
"""What an address may begin with."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)://")
_HUB_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"({_HUB_NAME}/{_HUB_NAME})(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?")
_HUB_PATH = re.compile(rf"({_HUB_NAME}/{_HUB_NAME})(?:@(refs/[^/@]+/[^/@]+|[^/@]+))?(?:/(.*))?")


_FILE_ENDINGS = (".json", ".safetensors", ".bin", ".pt")


class SourceKind(StrEnum):
    """Where an adapter can lie."""

    FOLDER = "folder"
    HTTP = "http"
    HUB = "hub"
    OBJECTS = "objects"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A source, taken apart."""

    kind: SourceKind
    """Where it lies."""
    shown: str
    """The source for messages and records: no user, password, query or fragment."""
    location: str
    """FOLDER: the path as given. OBJECTS: ``s3://bucket/prefix``. HTTP: scheme, host and path of
    the folder without a trailing slash. HUB: ``owner/name``."""
    query: str = ""
    """HTTP: the query, sent with every file's request (a token of the store's)."""
    user: tuple[str, str] | None = None
    """HTTP: user and password."""
    revision: str | None = None
    """HUB: branch, tag or commit; None is the main branch."""
    subfolder: str = ""
    """HUB: folder inside the repository."""


def parse_address(source: str | os.PathLike[str]) -> Address:
    """Tell what a source names.

    A text is a hub id when it has the form ``owner/name`` or ``owner/name@revision`` and neither
    the path ``owner/name`` nor a folder ``owner`` exists in the working directory. ``hf://`` is
    always the hub; a path object, and a text that begins with ``/``, ``.`` or ``~``, never is.

    Args:
        source: a path, or an address with one of `SCHEMES`.

    Raises:
        AdapterNotFoundError: the source is empty.
        SourceError: it has another scheme, or an address is not complete.
    """
    text = os.fspath(source)
    if not text:
        raise AdapterNotFoundError(source=text, reason="the path is empty")
    if isinstance(source, os.PathLike):
        return Address(kind=SourceKind.FOLDER, shown=text, location=text)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return _parse_plain(text)
    match scheme[1].lower():
        case "file":
            return _parse_file(text)
        case "s3" | "gs":
            return _parse_objects(text)
        case "http" | "https":
            return _parse_http(text)
        case "hf":
            return _parse_hub(text)
        case _:
            reason = f"an address begins with one of {', '.join(SCHEMES)}"
            raise SourceError(source=shown_source(text), reason=reason)


def shown_source(source: str | os.PathLike[str]) -> str:
    """Return a source as it may be shown: an address loses user, password, query and fragment."""
    text = os.fspath(source)
    if isinstance(source, os.PathLike) or not _SCHEME.match(text):
        return text
    head, _, _ = text.partition("?")
    scheme, _, rest = head.partition("#")[0].partition("://")
    if scheme.lower() in ("file", "hf"):
        return f"{scheme}://{rest}"
    authority, slash, path = rest.partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"


def looks_like_hub_id(text: str) -> bool:
    """Return whether a text has the form of a hub id and names nothing on this machine."""
    found = _HUB_ID.fullmatch(text)
    if found is None or ".." in text or "--" in found[1]:
        return False
    path = Path(text.partition("@")[0])
    return not any(os.path.lexists(place) for place in (path, path.parent, Path(text)))


def _parse_plain(text: str) -> Address:
    if looks_like_hub_id(text):
        repo, _, revision = text.partition("@")
        return Address(kind=SourceKind.HUB, shown=text, location=repo, revision=revision or None)
    return Address(kind=SourceKind.FOLDER, shown=text, location=text)


def _parse_file(text: str) -> Address:
    parts = _split(text)
    if parts.netloc not in ("", "localhost"):
        reason = f"it names the host {parts.netloc!r}; a folder here is file:///path"
        raise SourceError(source=shown_source(text), reason=reason)
    return Address(kind=SourceKind.FOLDER, shown=text, location=unquote(parts.path))


def _parse_objects(text: str) -> Address:
    shown = shown_source(text)
    # Keys of an object store may hold any character, so the text is not split as a web address.
    scheme, _, rest = text.partition("://")
    bucket, _, prefix = rest.partition("/")
    if not bucket or not prefix.strip("/"):
        reason = f"expected {scheme}://bucket/folder"
        raise SourceError(source=shown, reason=reason)
    if "@" in bucket:
        reason = "credentials are given in storage_options, not in the address"
        raise SourceError(source=shown, reason=reason)
    location = f"{scheme.lower()}://{bucket}/{prefix.strip('/')}"
    _check_folder(location, shown)
    return Address(kind=SourceKind.OBJECTS, shown=location, location=location)


def _parse_http(text: str) -> Address:
    parts = _split(text)
    if not parts.hostname:
        raise SourceError(source=shown_source(text), reason="the address names no host")
    _check_folder(parts.path, shown_source(text))
    user = None
    if parts.username is not None:
        user = (unquote(parts.username), unquote(parts.password or ""))
    host = parts.netloc.rpartition("@")[2]
    return Address(
        kind=SourceKind.HTTP,
        shown=shown_source(text),
        location=f"{parts.scheme.lower()}://{host}{parts.path.rstrip('/')}",
        query=parts.query,
        user=user,
    )


def _parse_hub(text: str) -> Address:
    found = _HUB_PATH.fullmatch(text[len("hf://") :])
    subfolder = (found[3] or "").strip("/") if found else ""
    if found is None or ".." in subfolder.split("/"):
        reason = "expected hf://owner/name, hf://owner/name@revision or .../folder behind it"
        raise SourceError(source=text, reason=reason)
    return Address(
        kind=SourceKind.HUB,
        shown=text,
        location=found[1],
        revision=unquote(found[2]) if found[2] else None,
        subfolder=subfolder,
    )


def _check_folder(path: str, shown: str) -> None:
    """Refuse an address of one file.

    Raises:
        SourceError: says that the folder is needed.
    """
    if path.endswith(_FILE_ENDINGS):
        reason = "it names a file; the folder that holds adapter_config.json is needed"
        raise SourceError(source=shown, reason=reason)


def _split(text: str) -> SplitResult:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError as error:  # a bad port or a bad IPv6 host; the text may hold credentials
        raise SourceError(source=shown_source(text), reason=f"not an address ({error})") from None
    return parts
