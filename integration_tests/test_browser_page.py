"""The web page in a real browser: looks, plots, keys, and the modules it computes with."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect
from prometheus_client.parser import text_string_to_metric_families
from support.browser import (
    PROMPT,
    WITHIN_MS,
    ask,
    choose,
    chromium,
    longest_common,
    opened,
    row,
    send_prompt,
    wait_for_answers,
    words_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Locator, Page, Route
    from support.fixture_types import StartServer
    from support.server import Server
    from support.worlds import World

pytestmark = pytest.mark.browser

PICTURES = Path(__file__).parents[1] / ".nox" / "artifacts" / "ui"
"""Where the screenshots stay; git ignores it."""
NAMES = ("a00", "a03", "a05", "a07")
SCHEMES = ("light", "dark")
DRAWN = re.compile(r"^M.*L")
expect.set_options(timeout=WITHIN_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(llama: World, start_server: StartServer) -> Iterator[Server]:
    flags = ["--adapter-root", str(llama.folder), "--max-loras", "4", "--max-lora-rank", "32"]
    with start_server(llama, *llama.lora_modules(*NAMES), *flags) as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """The page, on which nothing goes wrong."""
    with opened(browser, f"{server.url}/ui") as (page, record):
        expect(row(page, NAMES[-1])).to_be_visible()
        yield page
        assert (record.errors, record.refusals) == ([], [])


def overflow(page: Page) -> int:
    """Return by how many pixels the page is wider than the window."""
    pixels: int = page.evaluate("() => document.documentElement.scrollWidth - window.innerWidth")
    return pixels


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_the_window_in_every_state_and_its_picture_is_kept(
    browser: Browser, server: Server, width: int, scheme: Any
) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    size: Any = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}

    with opened(browser, f"{server.url}/ui", **size) as (page, record):
        expect(row(page, NAMES[-1])).to_be_visible()
        widths = [overflow(page)]
        choose(page, *NAMES[:3])
        send_prompt(page, PROMPT, max_tokens="32")
        wait_for_answers(page)
        widths.append(overflow(page))
        page.locator("#load-panel summary").click()
        page.get_by_label("Name", exact=True).fill("long-name" * 20)
        page.get_by_label("Path").fill("/no/such/folder" * 20)
        page.get_by_role("button", name="Load", exact=True).click()
        expect(page.locator("#load-notice")).to_contain_text("/no/such/folder")
        widths.append(overflow(page))
        page.get_by_role("button", name="API key").click()
        widths.append(overflow(page))
        expect(page.locator("path.line-1").first).to_have_attribute("d", DRAWN)
        expect(row(page, "a00").locator('[data-label="Residency"]')).to_have_text("device")
        page.screenshot(path=PICTURES / f"page-{width}-{scheme}.png", full_page=True)
        row(page, "a00").get_by_role("button", name="Unload").click()
        widths.append(overflow(page))
        page.screenshot(path=PICTURES / f"dialog-{width}-{scheme}.png")

    assert widths == [0] * len(widths)
    assert record.errors == []
    assert [path for _, path in record.refusals] == ["/v1/load_lora_adapter"]


def luminance(color: str) -> float:
    """Return the relative luminance of `#rrggbb`, as WCAG defines it."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_text_colour_stands_out_from_what_it_is_on(
    browser: Browser, server: Server, scheme: Any
) -> None:
    pairs = [
        *((text, ground) for text in ("text", "muted") for ground in ("page", "surface", "sunken")),
        *((text, "surface") for text in ("accent", "bad")),
        *((kind, f"{kind}-soft") for kind in ("accent", "good", "warn", "bad")),
        *(("text", ground) for ground in ("mark", "good-soft", "bad-soft")),
        ("on-accent", "accent"),
        ("warn", "surface"),
    ]

    with opened(browser, f"{server.url}/ui", color_scheme=scheme) as (page, _):
        colors: dict[str, str] = page.evaluate(
            """(names) => {
                const style = getComputedStyle(document.documentElement);
                const value = (name) => style.getPropertyValue(`--${name}`).trim();
                return Object.fromEntries(names.map((name) => [name, value(name)]));
            }""",
            sorted({name for pair in pairs for name in pair}),
        )

    contrasts = {}
    for text, ground in pairs:
        dark, light = sorted((luminance(colors[text]), luminance(colors[ground])))
        contrasts[text, ground] = (light + 0.05) / (dark + 0.05)
    assert {pair: ratio for pair, ratio in contrasts.items() if ratio < 4.5} == {}


def test_without_adapters_the_page_says_what_to_do(
    browser: Browser, llama: World, start_server: StartServer
) -> None:
    with (
        start_server(llama) as server,
        opened(browser, f"{server.url}/ui") as (page, record),
    ):
        expect(page.get_by_text("No adapter is served yet.")).to_be_visible()
        send_prompt(page, PROMPT, max_tokens="4")
        wait_for_answers(page)
        page.screenshot(path=PICTURES / "empty-1280-light.png", full_page=True)

    assert record.errors == []
    assert record.refusals == []


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(
    browser: Browser, llama: World, start_server: StartServer
) -> None:
    keys = ["--api-key", "user-key", "--admin-api-key", "admin-key"]
    with (
        start_server(llama, *llama.lora_modules("a00"), *keys) as server,
        opened(browser, f"{server.url}/ui") as (page, record),
    ):
        expect(page.locator("#key-why")).to_contain_text("This server asks for an API key")
        expect(page.get_by_text("key needed", exact=True)).to_be_visible()
        page.screenshot(path=PICTURES / "key-1280-light.png")
        page.get_by_label("API key", exact=True).fill("user-key")
        page.keyboard.press("Enter")
        pin = row(page, "a00").get_by_role("button", name="Pin a00")
        pin.click()
        refused = server.http.post(
            "/v1/adapters/a00/pin", headers={"Authorization": "Bearer user-key"}
        ).json()["error"]["message"]
        expect(page.locator("#adapters-notice")).to_have_text(refused)
        expect(page.locator("#key-why")).to_have_text(refused)
        page.get_by_label("API key", exact=True).fill("admin-key")
        page.keyboard.press("Enter")
        pin.click()
        expect(row(page, "a00")).to_contain_text("pinned")
        page.reload()
        expect(row(page, "a00")).to_contain_text("pinned")

        kept = page.evaluate("() => [localStorage.length, document.cookie, sessionStorage.length]")
        addresses = [request.url for request in record.requests]
        with opened(browser, f"{server.url}/ui") as (other, _):
            expect(other.locator("#key-why")).to_contain_text("This server asks for an API key")
        page.get_by_role("button", name="API key").click()
        page.get_by_role("button", name="Forget").click()
        expect(page.locator("#key-why")).to_contain_text("This server asks for an API key")
        assert page.evaluate("() => sessionStorage.length") == 0

    assert kept == [0, "", 1]
    assert [url for url in addresses if "key" in url] == []
    assert record.errors == []
    assert {status for status, _ in record.refusals} == {401}


def test_a_key_that_sees_some_adapters_sees_their_rows_and_its_own_answers(
    browser: Browser, llama: World, start_server: StartServer
) -> None:
    keys = llama.folder / "keys.yaml"
    keys.write_text("- {name: narrow, key: narrow-key, adapters: [a03]}\n")
    flags = [*llama.lora_modules("a00", "a03"), "--api-key-file", str(keys)]
    with (
        start_server(llama, *flags) as server,
        opened(browser, f"{server.url}/ui") as (page, record),
    ):
        page.get_by_label("API key", exact=True).fill("narrow-key")
        page.keyboard.press("Enter")
        expect(row(page, "a03")).to_be_visible()
        expect(page.get_by_text("serving", exact=True)).to_be_visible()
        expect(page.locator("#live-state")).to_contain_text("'narrow'")
        send_prompt(page, PROMPT, max_tokens="4")
        wait_for_answers(page)

        expect(page.locator("#key-panel")).to_be_hidden()
        expect(row(page, "a00")).to_have_count(0)
        expect(page.locator('[data-model="a03"] .answered-by')).to_contain_text("a03@")
        expect(page.locator('[data-model="base"] [role=alert]')).to_have_text(re.compile("."))

    assert record.errors == []


def test_the_page_works_below_the_prefix_of_a_proxy(browser: Browser, server: Server) -> None:
    paths: list[str] = []

    def strip(route: Route) -> None:
        paths.append(route.request.url.removeprefix(server.url))
        route.continue_(url=route.request.url.replace("/llm/", "/"))

    with opened(browser, "about:blank") as (page, record):
        page.route("**/*", strip)
        page.goto(f"{server.url}/llm/ui")
        expect(row(page, "a00")).to_be_visible()
        send_prompt(page, PROMPT, max_tokens="4")
        wait_for_answers(page)

    assert [path for path in paths if not path.startswith("/llm/")] == []
    assert "/llm/v1/chat/completions" in paths
    assert (record.errors, record.refusals) == ([], [])


def test_the_plots_show_what_the_metrics_count(page: Page, server: Server) -> None:
    def reading(title: str) -> Locator:
        return page.locator("article.tile").filter(has_text=title).locator(".reading-number")

    line = page.locator("article.tile").filter(has_text="Output").locator("path.line-1")
    expect(line).to_have_attribute("d", DRAWN)
    ask(server.http, "a00", is_chat=False, max_tokens=100)

    expect(page.get_by_text("highest")).not_to_have_text("highest 0")
    expect(reading("Time to first token")).to_have_text(re.compile(r"\d"))
    used = int(server.metric("lora_server_adapter_slots_used"))
    expect(reading("Adapter slots")).to_have_text(str(used))
    expect(page.get_by_text("of 4 used")).to_be_visible()
    expect(reading("Requests")).to_have_text("0")


def test_nothing_is_polled_while_the_page_is_hidden(browser: Browser, server: Server) -> None:
    hide = "() => Object.defineProperty(document, 'hidden', {get: () => %s, configurable: true})"
    change = "() => document.dispatchEvent(new Event('visibilitychange'))"
    with opened(browser, f"{server.url}/ui") as (page, record):
        expect(row(page, "a00")).to_be_visible()
        page.clock.install()
        page.evaluate(hide % "true")
        page.evaluate(change)
        page.clock.run_for(3000)
        record.requests.clear()

        page.clock.run_for(60_000)
        while_hidden = len(record.requests)
        page.evaluate(hide % "false")
        with page.expect_response("**/metrics"), page.expect_response("**/v1/adapters"):
            page.evaluate(change)

    assert while_hidden == 0


def test_a_weak_adapter_carries_a_badge(page: Page) -> None:
    def weaken(route: Route) -> None:
        body = route.fetch().json()
        body["data"][1]["effect"] = {"is_weak": True, "logit_shift": {"max": 0.01234}}
        body["data"][2]["effect"] = {"is_weak": False}
        route.fulfill(json=body)

    page.route("**/v1/adapters", weaken)

    expect(row(page, NAMES[1]).get_by_title("0.012")).to_have_text("weak effect")
    expect(row(page, NAMES[2])).not_to_contain_text("weak effect")


def test_the_exposition_is_read_as_the_client_library_reads_it(page: Page, server: Server) -> None:
    text = server.http.get("/metrics").text
    text += 'odd{a="b\\"}{\\\\ \\n,c=d",e=""} +Inf\nodd{a="2"} -1.5e-3\n'

    read: dict[str, list[Any]] = page.evaluate(
        """async (text) => {
            const {parse} = await import("/ui/exposition.js");
            const flat = ({labels, value}) => [labels, String(value)];
            return Object.fromEntries([...parse(text)].map(([k, v]) => [k, v.map(flat)]));
        }""",
        text,
    )

    expected: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            expected.setdefault(sample.name, []).append([sample.labels, sample.value])
    as_numbers = {
        name: [[labels, float(value.replace("Infinity", "inf"))] for labels, value in samples]
        for name, samples in read.items()
    }
    assert len(expected["odd"]) == 2
    assert as_numbers == expected


@pytest.mark.parametrize(("share", "expected"), [(0.25, 0.1), (0.5, 0.3), (0.95, 0.9), (1.0, 1.0)])
def test_quantiles_are_those_of_histogram_quantile(
    page: Page, share: float, expected: float
) -> None:
    before = [[0.1, 5], [0.5, 5], [1, 5], [None, 9]]
    after = [[0.1, 7], [0.5, 11], [1, 13], [None, 17]]

    found = page.evaluate(
        """async ([share, before, after]) => {
            const {quantile, since} = await import("/ui/exposition.js");
            const counts = (pairs) => new Map(pairs.map(([le, n]) => [le ?? Infinity, n]));
            return quantile(share, since(counts(before), counts(after)));
        }""",
        [share, before, after],
    )

    assert found == pytest.approx(expected)


def test_a_word_is_marked_exactly_when_the_longest_common_subsequence_lacks_it(page: Page) -> None:
    generator = random.Random(5)
    words = [" a", " b", "\nc", "  d", " \t e", " é/à"]
    pairs = [
        ["".join(generator.choices(words, k=generator.randint(0, 40))) + end for _ in range(2)]
        for end in ("", " ", " the end")
        for _ in range(20)
    ]

    compared: list[list[dict[str, Any]]] = page.evaluate(
        """async (pairs) => {
            const {compare} = await import("/ui/diff.js");
            return pairs.map(([base, text]) => compare(base, text).entries);
        }""",
        pairs,
    )

    for (base, text), entries in zip(pairs, compared, strict=True):
        same = [
            entry["text"].strip() for entry in entries if entry["isSame"] and entry["text"].strip()
        ]
        assert "".join(entry["text"] for entry in entries) == text
        assert len(same) == longest_common(words_of(base), words_of(text))
        assert longest_common(same, words_of(base)) == len(same)
