"""The web page's files: where they are, how they are sent, and that they ask no other host."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.resources import files
from posixpath import basename
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

import pytest

from lora_server.http.auth import ApiKeys
from lora_server.http.ui import CONTENT_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Harness

FOLDER = files("lora_server") / "assets" / "ui"
NAMES = sorted(item.name for item in FOLDER.iterdir())
SCRIPTS = [name for name in NAMES if name.endswith(".js")]
ORIGIN = "http://test"
PAGES = ("/ui", "/ui/")


class Page(HTMLParser):
    """What an HTML document refers to, defines and runs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.base = ""
        self.references: list[str] = []
        self.ids: list[str] = []
        self.pointers: list[str] = []
        self.inline: list[str] = []
        self._is_in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._is_in_script = tag == "script"
        if tag == "base":
            self.base = given["href"]
            return
        self.references += [given[name] for name in ("href", "src") if name in given]
        self.ids += [given["id"]] if "id" in given else []
        for name in ("for", "aria-labelledby", "aria-describedby", "aria-controls"):
            self.pointers += given.get(name, "").split()
        self.inline += [f"{tag} {name}" for name in given if name.startswith("on")]
        self.inline += [f"{tag} style"] if "style" in given or tag == "style" else []

    def handle_data(self, data: str) -> None:
        if self._is_in_script and data.strip():
            self.inline.append("script")

    def handle_endtag(self, tag: str) -> None:
        self._is_in_script = False


def text_of(name: str) -> str:
    return (FOLDER / name).read_text()


@pytest.mark.parametrize("path", PAGES)
def test_the_page_answers_with_and_without_the_slash(harness: Harness, path: str) -> None:
    response = harness.get(path)

    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>lora-server</title>" in response.text


@pytest.mark.parametrize("path", PAGES)
def test_everything_the_page_refers_to_exists_beside_it(harness: Harness, path: str) -> None:
    page = Page(harness.get(path).text)

    assert len(page.references) >= 3
    for reference in page.references:
        url = urljoin(urljoin(ORIGIN + path, page.base), reference)
        assert url.startswith(f"{ORIGIN}/ui/"), url
        assert harness.get(urlsplit(url).path).status_code == 200, url


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_module_a_script_imports_exists_beside_it(name: str) -> None:
    imported = re.findall(
        r'^(?:import|\} from|export) .*?from "(.+)";$', text_of(name), re.MULTILINE
    )

    assert {basename(path) for path in imported} <= set(NAMES)
    assert all(path == f"./{basename(path)}" for path in imported)


def test_every_script_is_reached_from_the_page() -> None:
    waiting, reached = ["app.js"], set()
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting += {*re.findall(r'from "\./(.+)";', text_of(name))} - reached

    assert sorted(reached) == SCRIPTS


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_sent_as_what_it_is_and_runs_nothing_from_elsewhere(
    harness: Harness, name: str
) -> None:
    response = harness.get(f"/ui/{name}")

    suffix = "." + name.rsplit(".", 1)[1]
    assert response.status_code == 200
    assert response.content == (FOLDER / name).read_bytes()
    assert response.headers["content-type"] == CONTENT_TYPES[suffix]
    policy = response.headers["content-security-policy"].split("; ")
    assert "default-src 'self'" in policy
    assert not any("unsafe" in rule or "http" in rule for rule in policy)
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", [*PAGES, "/ui/app.js"])
@pytest.mark.parametrize("form", ["{}", "W/{}", '"other", {}'])
def test_a_file_the_browser_has_is_not_sent_again(harness: Harness, path: str, form: str) -> None:
    first = harness.get(path)

    headers = {"If-None-Match": form.format(first.headers["etag"])}
    again = harness.get(path, headers=headers)

    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert harness.get(path, headers={"If-None-Match": '"other"'}).status_code == 200


def test_files_of_different_content_have_different_tags(harness: Harness) -> None:
    tags = [harness.get(path).headers["etag"] for path in (*PAGES, *(f"/ui/{n}" for n in SCRIPTS))]

    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize(
    "path", ["/ui/nothing.js", "/ui/../app.py", "/ui/%2e%2e/app.py", "/ui/ui/app.js", "/ui/app"]
)
def test_nothing_else_is_served_below_the_page(harness: Harness, path: str) -> None:
    response = harness.get(path)

    assert response.status_code == 404
    assert harness.error(response)["code"] == "unknown_url"


@pytest.mark.parametrize("name", NAMES)
def test_no_file_names_another_host(name: str) -> None:
    # The one address that may stand there is the name of a format, which nobody fetches.
    addresses = re.findall(
        r"(?:https?|wss?):?//[^\"'\s]+|[\"'(=]//|url\([^)]*\)|@import", text_of(name)
    )

    assert set(addresses) <= {"http://www.w3.org/2000/svg"}


def test_the_page_has_no_inline_script_or_style() -> None:
    assert Page(text_of("index.html")).inline == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_makes_code_or_markup_of_text(name: str) -> None:
    banned = r"(?:inn|out)erHTML|insertAdjacent|document\.write|\beval\(|new Function|localStorage"

    assert re.findall(banned, text_of(name)) == []


def test_ids_are_unique_and_every_pointer_to_one_leads_somewhere() -> None:
    page = Page(text_of("index.html"))
    asked = {i for name in SCRIPTS for i in re.findall(r'byId\("([^"]+)"\)', text_of(name))}

    assert len(set(page.ids)) == len(page.ids)
    assert asked | set(page.pointers) <= set(page.ids)


def test_the_page_is_open_where_the_api_needs_a_key(make_harness: Callable[..., Harness]) -> None:
    harness = make_harness(keys=ApiKeys(user=("K",), admin="M"))

    assert [harness.get(path).status_code for path in (*PAGES, "/ui/app.js")] == [200, 200, 200]
    assert harness.get("/v1/adapters").status_code == 401
