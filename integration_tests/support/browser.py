"""Debian's Chromium with one page open, and a record of what the page did that it should not."""

from __future__ import annotations

import re
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Locator, Page, sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import httpx
    from playwright.sync_api import ConsoleMessage, Request, Response

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
WITHIN_MS = 20_000
PROMPT = "follows that written answer written to what question in"
"""After it the tiny base and its adapters go on for more than a hundred tokens."""
_JS_SPACE = re.compile("[\t\n\v\f\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]+")
_REFUSED = re.compile(r"Failed to load resource: the server responded with a status of \d+")


@dataclass
class Record:
    """What a page said and asked for. Without slots: playwright marks its listeners."""

    errors: list[str] = field(default_factory=list)
    """Errors and warnings of the console, and exceptions, except those that `refusals` lists."""
    refusals: list[tuple[int, str]] = field(default_factory=list)
    """Status and path of each reply of 400 and more; Chromium writes them to the console too."""
    requests: list[Request] = field(default_factory=list)

    def hosts(self) -> set[str]:
        """Return the hosts and ports that were asked."""
        return {urlsplit(request.url).netloc for request in self.requests}

    def note_console(self, message: ConsoleMessage) -> None:
        """Take a line of the console."""
        if message.type in {"error", "warning"} and not _REFUSED.match(message.text):
            self.errors.append(f"{message.type}: {message.text}")

    def note_request(self, request: Request) -> None:
        """Take a request."""
        self.requests.append(request)

    def note_response(self, response: Response) -> None:
        """Take a reply."""
        if response.status >= 400:
            self.refusals.append((response.status, urlsplit(response.url).path))


def ask(client: httpx.Client, model: str, *, is_chat: bool, max_tokens: int) -> tuple[str, str]:
    """Ask the API as the page does, but in one piece; return what answered and its text."""
    body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0}
    if is_chat:
        body["messages"] = [{"role": "user", "content": PROMPT}]
        reply = client.post("/v1/chat/completions", json=body)
        text = reply.raise_for_status().json()["choices"][0]["message"]["content"]
    else:
        reply = client.post("/v1/completions", json=body | {"prompt": PROMPT})
        text = reply.raise_for_status().json()["choices"][0]["text"]
    return reply.headers["x-lora-adapter"], text


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run the browser while the block lasts."""
    path = shutil.which("chromium")
    assert path is not None, "chromium is not installed; on Debian: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, **context: Any) -> Iterator[tuple[Page, Record]]:
    """Open a page in a context of its own, which remembers nothing of others."""
    opened_context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
    opened_context.set_default_timeout(WITHIN_MS)
    record = Record()
    page = opened_context.new_page()
    page.on("console", record.note_console)
    page.on("pageerror", lambda error: record.errors.append(f"exception: {error}"))
    page.on("request", record.note_request)
    page.on("response", record.note_response)
    try:
        page.goto(url)
        yield page, record
    finally:
        opened_context.close()


def row(page: Page, adapter: str) -> Locator:
    """Return an adapter's row."""
    return page.locator(f'tr[data-adapter="{adapter}"]')


def column(page: Page, title: str) -> Locator:
    """Return one answer of the playground."""
    return page.locator(f'article[data-model="{title}"]')


def choose(page: Page, *adapters: str) -> None:
    """Choose the adapters of the playground; the others are none."""
    for idx in range(3):
        chosen = adapters[idx] if idx < len(adapters) else ""
        page.get_by_label(f"Adapter {idx + 1}", exact=True).select_option(chosen)


def send_prompt(page: Page, prompt: str, **fields: str) -> None:
    """Fill in the playground's form and send it; `max_tokens` stands for its label."""
    for name, value in fields.items():
        page.get_by_label(name.replace("_", " ").capitalize()).fill(value)
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_role("button", name="Send").click()


def wait_for_answers(page: Page) -> None:
    """Return when all columns have ended."""
    page.locator("#run:not([aria-disabled])").wait_for()


def focused(page: Page) -> dict[str, str]:
    """Describe the element that the keyboard is on."""
    described: dict[str, str] = page.evaluate(
        """() => {
            const node = document.activeElement;
            const style = getComputedStyle(node);
            return {
                id: node.id,
                name: node.getAttribute("aria-label") ?? node.textContent.trim(),
                tag: node.localName,
                outline: `${style.outlineStyle} ${style.outlineWidth}`,
            };
        }"""
    )
    return described


def tab_to(page: Page, *, max_presses: int = 80, **wanted: str) -> list[dict[str, str]]:
    """Press Tab until the focus is on what is wanted; return every stop on the way."""
    stops: list[dict[str, str]] = []
    for _ in range(max_presses):
        page.keyboard.press("Tab")
        stops.append(focused(page))
        if wanted.items() <= stops[-1].items():
            return stops
    raise AssertionError(f"Tab does not lead to {wanted}: {[stop['name'] for stop in stops]}")


def longest_common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    lengths = [0] * (len(other) + 1)
    for word in one:
        before = list(lengths)
        for idx, partner in enumerate(other):
            best = max(before[idx + 1], lengths[idx])
            lengths[idx + 1] = before[idx] + 1 if word == partner else best
    return lengths[-1]


def words_of(text: str) -> list[str]:
    """Split a text at what JavaScript takes for white space, which is not what Python does."""
    return [word for word in _JS_SPACE.split(text) if word]
