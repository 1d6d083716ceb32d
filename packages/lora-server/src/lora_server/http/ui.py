"""Serves the web page at `/ui`: static files that carry no data and ask no other host.

The files are open to everybody; what the page shows it asks of the API, with the key that its user
enters. Knows nothing of what is in the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Final

from fastapi import APIRouter, HTTPException, Request, Response

from lora_server.http.auth import OpenRoute

CONTENT_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        ".css": "text/css; charset=utf-8",
        ".html": "text/html; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)
"""By suffix; a file of another kind does not belong to the page."""

_INDEX: Final = "index.html"
_BASE: Final = b'<base href="./">'
_BASE_WITHOUT_SLASH: Final = b'<base href="ui/">'
_HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        # Asked for again each time, and answered without a body while it is unchanged: a page of
        # one release never runs against the server of the next.
        "Cache-Control": "no-cache",
        "Content-Security-Policy": (
            "default-src 'self'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'; "
            "object-src 'none'"
        ),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
)


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, as it is sent."""

    content: bytes
    content_type: str
    etag: str

    def reply(self, request: Request) -> Response:
        """Answer with the file, or with nothing but its tag when the caller has it already."""
        headers = {**_HEADERS, "ETag": self.etag}
        known = request.headers.get("if-none-match", "")
        if self.etag in {tag.strip().removeprefix("W/") for tag in known.split(",")}:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.content_type)


def build_ui_router() -> APIRouter:
    """Read the page's files and return the routes that serve them."""
    pages = _read_files()
    router = APIRouter(route_class=OpenRoute)
    # The page names its files relative to itself, so that it works below a proxy's prefix. Without
    # the slash at the end of its address they are one level further down.
    index = pages[_INDEX].content
    pages_without_slash = _page_file(index.replace(_BASE, _BASE_WITHOUT_SLASH), _INDEX)

    @router.get("/ui", include_in_schema=False)
    async def get_page_without_slash(request: Request) -> Response:
        """Return the page."""
        return pages_without_slash.reply(request)

    @router.get("/ui/", include_in_schema=False)
    async def get_page(request: Request) -> Response:
        """Return the page."""
        return pages[_INDEX].reply(request)

    @router.get("/ui/{name}", include_in_schema=False)
    async def get_file(name: str, request: Request) -> Response:
        """Return one of the page's files."""
        if name not in pages:
            raise HTTPException(404)
        return pages[name].reply(request)

    return router


def _read_files() -> dict[str, PageFile]:
    folder = files("lora_server") / "assets" / "ui"
    return {item.name: _page_file(item.read_bytes(), item.name) for item in folder.iterdir()}


def _page_file(content: bytes, name: str) -> PageFile:
    suffix = name[name.rindex(".") :]
    digest = hashlib.sha256(content).hexdigest()[:32]
    return PageFile(content, CONTENT_TYPES[suffix], f'"{digest}"')
