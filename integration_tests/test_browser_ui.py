"""The web page in a real browser: adapters, the buttons beside them, and the playground."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect
from support.adapters import CONFIG
from support.browser import (
    PROMPT,
    WITHIN_MS,
    ask,
    choose,
    chromium,
    column,
    focused,
    longest_common,
    opened,
    row,
    send_prompt,
    tab_to,
    wait_for_answers,
    words_of,
)
from support.requests import load, refusal, served
from support.server import BASE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Locator, Page
    from support.browser import Record
    from support.fixture_types import StartServer
    from support.server import Server
    from support.worlds import World

pytestmark = pytest.mark.browser

NAMES = ("a00", "a01", "a03", "a05")
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
def visit(browser: Browser, server: Server) -> Iterator[tuple[Page, Record]]:
    """The page, whose end is part of each test: nothing went wrong, and nobody else was asked."""
    with opened(browser, f"{server.url}/ui") as (page, record):
        expect(row(page, NAMES[-1])).to_be_visible()
        yield page, record
        assert record.errors == []
        assert record.hosts() == {server.url.removeprefix("http://")}


@pytest.fixture
def page(visit: tuple[Page, Record]) -> Iterator[Page]:
    """The page, on which nothing is refused."""
    page, record = visit
    yield page
    assert record.refusals == []


def answer_in(column: Locator) -> str:
    return column.locator(".answer-text").text_content() or ""


@pytest.mark.parametrize("path", ["/ui", "/ui/"])
def test_each_row_tells_what_the_api_tells(browser: Browser, server: Server, path: str) -> None:
    cards = server.http.get("/v1/adapters").raise_for_status().json()["data"]

    with opened(browser, server.url + path) as (page, record):
        for card in cards:
            lora, cells = card["lora"], row(page, card["id"])
            shown = {
                label: cells.locator(f'[data-label="{label}"]')
                for label in ("Residency", "Rank", "Digest", "Hits", "Running", "Waiting")
            }
            expect(shown["Residency"]).to_have_text(lora["residency"])
            expect(shown["Digest"]).to_have_text(lora["digest"][:12])
            for name in ("Rank", "Hits", "Running", "Waiting"):
                expect(shown[name]).to_have_text(str(lora[name.lower()]))
            expect(cells.get_by_title(f"{lora['bytes']:,} bytes")).to_be_visible()
            expect(cells.get_by_text(card["root"], exact=True)).to_be_visible()
        expect(page.get_by_text(f"{len(cards)} adapters", exact=True)).to_be_visible()
        expect(page.locator("#served")).to_contain_text(BASE_NAME)

    assert len(cards) == len(NAMES)
    assert record.errors == []
    assert record.refusals == []


def test_hits_grow_with_use(page: Page, server: Server) -> None:
    hits = row(page, "a01").locator('[data-label="Hits"]')
    for _ in range(3):
        ask(server.http, "a01", is_chat=False, max_tokens=2)

    lora = server.http.get("/v1/adapters/a01").json()["lora"]

    assert lora["hits"] >= 2
    expect(hits).to_have_text(str(lora["hits"]))


def broken_adapter(world: World) -> Path:
    """Write an adapter with several faults."""
    folder = world.folder / "broken"
    if not folder.exists():
        shutil.copytree(world.adapters["a03"], folder)
        config = json.loads((folder / CONFIG).read_text())
        config |= {"use_qalora": True, "megatron_config": {"a": 1}, "r": 5}
        (folder / CONFIG).write_text(json.dumps(config))
    return folder


def fill_load_form(page: Page, name: str, path: Path | str, *, pinned: bool = False) -> None:
    panel = page.locator("#load-panel")
    if panel.get_attribute("open") is None:
        panel.locator("summary").click()
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Path").fill(str(path))
    page.get_by_label("Pinned", exact=True).set_checked(pinned)
    page.get_by_role("button", name="Load", exact=True).click()


def test_a_refused_load_shows_the_servers_message_and_every_detail(
    visit: tuple[Page, Record], server: Server, llama: World
) -> None:
    page, record = visit
    folder = broken_adapter(llama)
    error = refusal(load(server.http, "broken", folder), 400, "invalid_adapter")
    notice = page.locator("#load-notice")

    fill_load_form(page, "broken", folder)

    expect(notice).to_contain_text(error["message"])
    assert len(error["details"]) >= 2
    assert notice.locator("li").all_text_contents() == error["details"]
    assert record.refusals == [(400, "/v1/load_lora_adapter")]
    assert page.get_by_label("Name", exact=True).input_value() == "broken"
    expect(row(page, "broken")).to_have_count(0)


def test_an_adapter_is_loaded_unpinned_pinned_and_unloaded(
    page: Page, server: Server, llama: World
) -> None:
    new = row(page, "new")

    fill_load_form(page, "new", llama.adapters["a07"], pinned=True)
    expect(new).to_contain_text("pinned")
    loaded = server.http.get("/v1/adapters/new").json()["lora"]
    new.get_by_role("button", name="Unpin new").click()
    expect(page.get_by_text("new is unpinned.")).to_be_visible()
    unpinned = server.http.get("/v1/adapters/new").json()["lora"]
    new.get_by_role("button", name="Pin new", exact=True).click()
    expect(page.get_by_text("new is pinned.")).to_be_visible()
    pinned = server.http.get("/v1/adapters/new").json()["lora"]
    new.get_by_role("button", name="Unload new").click()
    page.get_by_role("button", name="Cancel").click()
    kept = served(server.http)
    new.get_by_role("button", name="Unload new").click()
    page.get_by_role("dialog").get_by_role("button", name="Unload").click()
    expect(new).to_have_count(0)

    assert [lora["pinned"] for lora in (loaded, unpinned, pinned)] == [True, False, True]
    assert "new" in kept
    assert "new" not in served(server.http)
    expect(page.get_by_text("new is unloaded.")).to_be_visible()


def test_the_digest_is_copied_whole(page: Page, server: Server) -> None:
    digest = server.http.get("/v1/adapters/a00").json()["lora"]["digest"]
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])

    row(page, "a00").get_by_role("button", name="Copy digest").click()

    expect(page.locator("#adapters-notice")).to_contain_text(digest)
    assert page.evaluate("() => navigator.clipboard.readText()") == digest


def test_the_filter_and_the_order_decide_what_is_shown(page: Page, server: Server) -> None:
    names = page.locator("#adapter-rows .name-text")
    sizes = {c["id"]: c["lora"]["bytes"] for c in server.http.get("/v1/adapters").json()["data"]}

    page.get_by_label("Order").select_option("largest")
    ordered = names.all_text_contents()
    page.get_by_label("Filter").fill("A03")
    filtered = names.all_text_contents()
    page.get_by_label("Filter").fill("nobody")

    assert ordered == sorted(NAMES, key=lambda name: -sizes[name])
    assert filtered == ["a03"]
    expect(page.get_by_text("No name or path contains “nobody”.")).to_be_visible()


def test_a_row_that_moves_keeps_the_focus_in_it(page: Page, server: Server) -> None:
    names = page.locator("#adapter-rows .name-text")
    page.get_by_label("Order").select_option("most hits")
    last = names.all_text_contents()[-1]
    row(page, last).get_by_role("button", name="Unload").focus()
    top = max(c["lora"]["hits"] for c in server.http.get("/v1/adapters").json()["data"])

    for _ in range(top + 2):
        ask(server.http, last, is_chat=False, max_tokens=1)

    expect(names.first).to_have_text(last)
    assert focused(page)["name"] == f"Unload {last}"


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "completion"])
def test_the_playground_shows_what_the_api_answers_and_marks_each_word_that_differs(
    page: Page, server: Server, *, is_chat: bool
) -> None:
    chosen = ("a00", "a03", "a05")
    page.get_by_label("Chat" if is_chat else "Completion", exact=True).check()
    choose(page, *chosen)

    send_prompt(page, PROMPT, max_tokens="100", temperature="0")
    wait_for_answers(page)

    texts: dict[str, list[str]] = {}
    for title in ("base", *chosen):
        model = BASE_NAME if title == "base" else title
        label, text = ask(server.http, model, is_chat=is_chat, max_tokens=100)
        shown = column(page, title)
        texts[title] = words_of(text)
        marked = shown.locator("mark").all_text_contents()
        num_same = longest_common(texts["base"], texts[title])
        expect(shown.locator(".answered-by")).to_have_text(label)
        assert answer_in(shown) == text
        assert len(texts[title]) - len(marked) == num_same
        assert set(marked) <= set(texts[title])
    assert len(set(map(tuple, texts.values()))) == 1 + len(chosen)
    expect(page.locator("#play-status")).to_contain_text("a05 answered")


def test_an_error_is_shown_in_its_own_column_and_the_others_answer(
    visit: tuple[Page, Record], server: Server, llama: World
) -> None:
    page, record = visit
    load(server.http, "leaver", llama.adapters["a02"]).raise_for_status()
    expect(row(page, "leaver")).to_be_visible()
    choose(page, "a00", "leaver")
    # The page does not learn of it, as between two readings of the list.
    before = server.http.get("/v1/adapters").json()
    page.route("**/v1/adapters", lambda route: route.fulfill(json=before))
    server.http.post("/v1/unload_lora_adapter", json={"lora_name": "leaver"}).raise_for_status()

    send_prompt(page, PROMPT, max_tokens="8")
    wait_for_answers(page)

    error = refusal(
        server.http.post("/v1/completions", json={"model": "leaver", "prompt": PROMPT}),
        404,
        "model_not_found",
    )
    expect(column(page, "leaver").get_by_role("alert")).to_contain_text(error["message"])
    expect(column(page, "leaver").locator(".answered-by")).to_have_text("no answer")
    assert record.refusals == [(404, "/v1/chat/completions")]
    for title in ("base", "a00"):
        assert answer_in(column(page, title)) != ""


def test_stop_ends_all_streams_and_keeps_what_has_come(page: Page, server: Server) -> None:
    choose(page, "a00", "a01")
    network = page.context.new_cdp_session(page)
    network.send("Network.enable")
    slow = {"offline": False, "latency": 0, "downloadThroughput": 1500, "uploadThroughput": -1}
    network.send("Network.emulateNetworkConditions", slow)

    send_prompt(page, PROMPT, max_tokens="100")
    for title in ("base", "a00", "a01"):
        expect(column(page, title).locator(".answer-text")).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    wait_for_answers(page)

    for title in ("base", "a00", "a01"):
        model = BASE_NAME if title == "base" else title
        _, text = ask(server.http, model, is_chat=True, max_tokens=100)
        shown = answer_in(column(page, title))
        assert text.startswith(shown)
        assert shown != text
        expect(column(page, title).locator(".answer-foot")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    assert focused(page)["id"] == "run"
    assert server.wait_for(lambda: server.metric("vllm:num_requests_running") == 0)


def test_the_keyboard_alone_pins_an_adapter_and_asks_the_playground(
    page: Page, server: Server
) -> None:
    stops = tab_to(page, name="Pin a00")
    page.keyboard.press("Enter")
    expect(row(page, "a00")).to_contain_text("pinned")
    after_pin = focused(page)
    is_pinned = server.http.get("/v1/adapters/a00").json()["lora"]["pinned"]
    page.keyboard.press("Space")
    expect(page.get_by_text("a00 is unpinned.")).to_be_visible()

    stops += tab_to(page, tag="input", id="")  # the radio buttons are the only ones without an id
    page.keyboard.press("ArrowRight")
    stops += tab_to(page, id="prompt")
    page.keyboard.type(PROMPT)
    stops += tab_to(page, id="max-tokens")
    page.keyboard.press("Control+a")
    page.keyboard.type("6")
    stops += tab_to(page, id="adapter-1")
    page.keyboard.type("a05")
    stops += tab_to(page, id="run")
    page.keyboard.press("Enter")
    expect(column(page, "a05")).to_be_visible()
    wait_for_answers(page)

    assert is_pinned is True
    assert after_pin["name"] == "Unpin a00"
    assert answer_in(column(page, "a05")) == ask(server.http, "a05", is_chat=False, max_tokens=6)[1]
    assert [stop for stop in stops if stop["outline"] == "none 0px"] == []
