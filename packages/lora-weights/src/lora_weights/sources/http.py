"""Files over HTTP, with the standard library. Knows no cache and no adapter.

Ranges are asked for with ``If-Range``, so that a file that changed in between comes whole
(RFC 9110, 13.1.5). A version is a strong ETag, or a date of change that is old enough to be one
(RFC 9110, 8.8.2.2).
"""

from __future__ import annotations

import base64
import http.client
import re
import urllib.error
import urllib.request
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from lora_weights.sources.store import CHUNK_BYTES, ChangedError, RemoteStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from email.message import Message
    from http.client import HTTPMessage
    from typing import IO

TIMEOUT_S = 60.0
"""Longest wait for the next bytes of a server."""

_GONE = (404, 410)
_RANGE_NOT_THERE = 416
_STRONG_AFTER_S = 60
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class HttpStore:
    """A folder behind a web address. It cannot be listed."""

    def __init__(
        self,
        folder: str,
        *,
        query: str = "",
        user: tuple[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Remember where and how; nothing is opened yet.

        Args:
            folder: ``https://host/path`` without a trailing slash.
            query: sent with every file's request.
            user: user and password for HTTP basic authentication.
            headers: sent to this server, and to no other one that it redirects to.
            timeout_s: longest wait for a connection or the next bytes.
        """
        self._folder = folder
        self._query = f"?{query}" if query else ""
        self._headers = dict(headers or {})
        if user is not None:
            text = base64.b64encode(":".join(user).encode()).decode()
            self._headers["Authorization"] = f"Basic {text}"
        self._timeout_s = timeout_s
        self._opener = _build_opener()

    def list_names(self) -> tuple[str, ...] | None:
        """Return None: HTTP has no listings."""
        return None

    @contextmanager
    def open(
        self,
        name: str,
        *,
        start: int = 0,
        version: str | None = None,
        length: int | None = None,
        known: str | None = None,
    ) -> Iterator[RemoteStream]:
        """Open a file; as `RemoteStore.open`.

        Raises:
            FileNotFoundError: the server says that it has no such file.
            ConnectionError: it cannot be reached, or answers with another error.
        """
        request = self._request(name)
        if start and version is not None:
            request.add_header("Range", f"bytes={start}-")
            request.add_header("If-Range", version.removeprefix(_DATE))
        elif length is not None:
            request.add_header("Range", f"bytes=0-{length - 1}")
        elif known is not None:
            condition = "If-Modified-Since" if known.startswith(_DATE) else "If-None-Match"
            request.add_header(condition, known.removeprefix(_DATE))
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                yield _stream(response, start if version is not None else 0, version)
        except urllib.error.HTTPError as error:
            # The text of such an error may hold an address with a token; its number says enough.
            error.close()
            if error.code == http.client.NOT_MODIFIED and known is not None:
                yield RemoteStream(size=None, version=known, start=0, chunks=iter(()))
                return
            if error.code in _GONE:
                raise FileNotFoundError(f"{name}: HTTP {error.code}") from None
            if error.code == _RANGE_NOT_THERE:
                raise ChangedError(f"{name}: shorter than before") from None
            phrase = http.client.responses.get(error.code, "")
            raise ConnectionError(f"{name}: HTTP {error.code} {phrase}".rstrip()) from None
        except urllib.error.URLError as error:
            raise ConnectionError(f"{name}: {error.reason}") from error
        except http.client.HTTPException as error:
            raise ConnectionError(f"{name}: {type(error).__name__} {error}".rstrip()) from error

    def _request(self, name: str) -> urllib.request.Request:
        address = f"{self._folder}/{quote(name)}{self._query}"
        request = urllib.request.Request(address)  # noqa: S310 - the opener knows http(s) only
        request.add_header("User-Agent", "lora-weights")
        # Compressed on the way, a file would have another length.
        request.add_header("Accept-Encoding", "identity")
        for key, value in self._headers.items():
            request.add_unredirected_header(key, value)
        return request


_DATE = "date "


def _stream(response: http.client.HTTPResponse, start: int, version: str | None) -> RemoteStream:
    """Describe a successful answer."""
    headers = response.headers
    found = _version(headers)
    if response.status != http.client.PARTIAL_CONTENT:
        length = headers.get("Content-Length")
        size = int(length) if length and length.isdecimal() and _is_plain(headers) else None
        return RemoteStream(size=size, version=found, start=0, chunks=_chunks(response))
    place = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
    if place is None or int(place[1]) != start:
        raise ConnectionError(f"bytes from {start} asked for, others sent")
    if start and found is not None and found != version:
        raise ChangedError("another version was sent than asked for")
    size = None if place[2] == "*" else int(place[2])
    version = version if start else found
    return RemoteStream(size=size, version=version, start=start, chunks=_chunks(response))


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the body. A body of known length just ends when the connection does."""
    try:
        while chunk := response.read1(CHUNK_BYTES):
            yield chunk
    except http.client.IncompleteRead as error:
        raise ConnectionError("the connection ended before the file did") from error


def _is_plain(headers: Message) -> bool:
    return headers.get("Content-Encoding", "identity") == "identity"


def _version(headers: Message) -> str | None:
    """Return what identifies these bytes, or None when the server has no such thing."""
    tag = headers.get("ETag", "").strip()
    if tag.startswith('"'):
        return str(tag)
    changed, now = headers.get("Last-Modified", ""), headers.get("Date", "")
    try:
        age_s = (parsedate_to_datetime(now) - parsedate_to_datetime(changed)).total_seconds()
    except (TypeError, ValueError):  # no such headers, or one of them without a time zone
        return None
    # A second write within the same second would leave the date as it is.
    return f"{_DATE}{changed}" if age_s >= _STRONG_AFTER_S else None


def _build_opener() -> urllib.request.OpenerDirector:
    """Return an opener that knows http and https, and neither files nor FTP."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        _Redirects(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; credentials stay with the server they were meant for."""

    def redirect_request(  # noqa: PLR0917 - the signature is the library's
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Return the request to the new place."""
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if old.scheme == "https" and new.scheme != "https":
            raise ConnectionError(f"redirected from https to {new.scheme}")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and (old.scheme, old.netloc) == (new.scheme, new.netloc):
            for key, value in req.unredirected_hdrs.items():
                request.add_unredirected_header(key, value)
        return request
