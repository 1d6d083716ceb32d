"""Adapters come, change and go while the server runs, and every name means what it says."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from support.adapters import CONFIG, WEIGHTS
from support.requests import (
    body,
    complete,
    expected,
    load,
    refusal,
    served,
    streamed,
    unload,
)
from support.server import BASE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx
    from support.worlds import World


@pytest.fixture
def live(llama: World, managed: httpx.Client) -> Iterator[Path]:
    """A folder that holds a copy of a03 and is served as `live`."""
    folder = llama.folder / "live"
    shutil.copytree(llama.adapters["a03"], folder)
    load(managed, "live", folder).raise_for_status()
    yield folder
    managed.post("/v1/unload_lora_adapter", json={"lora_name": "live"})
    shutil.rmtree(folder)


def replace_content(folder: Path, source: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        shutil.copyfile(source / name, folder / name)


def test_a_loaded_adapter_answers_as_under_peft_and_shows_its_card(
    llama: World, managed: httpx.Client
) -> None:
    reply = load(managed, "sql", llama.adapters["a07"])

    card = reply.raise_for_status().json()
    assert card["id"] == "sql"
    assert card["root"] == str(llama.adapters["a07"])
    assert card["parent"] == BASE_NAME
    assert card["lora"]["rank"] == 12
    assert len(card["lora"]["digest"]) == 64
    assert card["lora"]["residency"] in {"device", "host"}
    assert card["lora"]["pinned"] is False
    assert complete(managed, "sql") == expected(llama, "a07")
    assert served(managed) == [BASE_NAME, "a00", "a01", "sql"]
    unload(managed, "sql").raise_for_status()


def test_an_unloaded_adapter_is_gone_at_once_and_comes_back_the_same(
    llama: World, managed: httpx.Client
) -> None:
    first = load(managed, "again", llama.adapters["a09"]).raise_for_status().json()
    answer = complete(managed, "again")

    unload(managed, "again").raise_for_status()

    refusal(managed.post("/v1/completions", json=body("again")), 404, "model_not_found")
    refusal(unload(managed, "again"), 404, "adapter_not_found")
    assert "again" not in served(managed)
    second = load(managed, "again", llama.adapters["a09"]).raise_for_status().json()
    assert second["lora"]["digest"] == first["lora"]["digest"]
    assert complete(managed, "again") == answer == expected(llama, "a09")
    unload(managed, "again").raise_for_status()


def test_a_name_that_is_taken_needs_load_inplace(
    llama: World, managed: httpx.Client, live: Path
) -> None:
    replace_content(live, llama.adapters["a09"])

    error = refusal(load(managed, "live", live), 400, "adapter_already_loaded")

    assert "live" in error["message"]
    assert complete(managed, "live") == expected(llama, "a03")


def test_the_base_name_cannot_be_taken(llama: World, managed: httpx.Client) -> None:
    reply = load(managed, BASE_NAME, llama.adapters["a09"], load_inplace=True)

    assert reply.status_code == 400, reply.text
    assert complete(managed) == expected(llama, None)


def test_new_content_under_the_same_path_and_name_answers_from_the_next_request_on(
    llama: World, managed: httpx.Client, live: Path
) -> None:
    before = complete(managed, "live")
    old = managed.get("/v1/adapters/live").json()["lora"]["digest"]
    replace_content(live, llama.adapters["a09"])

    new = load(managed, "live", live, load_inplace=True).raise_for_status().json()

    assert before == expected(llama, "a03")
    assert new["lora"]["digest"] != old
    assert complete(managed, "live") == expected(llama, "a09")


def test_a_running_stream_ends_on_the_version_it_began_with(
    llama: World, managed: httpx.Client, live: Path
) -> None:
    num_tokens = 160
    fields = {"stream": True, "max_tokens": num_tokens}

    with managed.stream("POST", "/v1/completions", json=body("live", **fields)) as stream:
        chunks = streamed(stream)
        token_ids = next(chunks)
        replace_content(live, llama.adapters["a09"])
        load(managed, "live", live, load_inplace=True).raise_for_status()
        meanwhile = complete(managed, "live")
        for chunk in chunks:
            token_ids += chunk

    assert meanwhile == expected(llama, "a09")
    assert tuple(token_ids) == expected(llama, "a03", num_tokens)


def test_a_running_stream_survives_the_unloading_of_its_adapter(
    llama: World, managed: httpx.Client
) -> None:
    num_tokens = 160
    load(managed, "short-lived", llama.adapters["a08"]).raise_for_status()

    fields = {"stream": True, "max_tokens": num_tokens}
    with managed.stream("POST", "/v1/completions", json=body("short-lived", **fields)) as stream:
        chunks = streamed(stream)
        token_ids = next(chunks)
        unload(managed, "short-lived").raise_for_status()
        late = managed.post("/v1/completions", json=body("short-lived"))
        for chunk in chunks:
            token_ids += chunk

    refusal(late, 404, "model_not_found")
    assert tuple(token_ids) == expected(llama, "a08", num_tokens)


def test_a_replacement_that_fails_leaves_the_old_version_serving(
    llama: World, managed: httpx.Client, live: Path
) -> None:
    (live / WEIGHTS).write_bytes((live / WEIGHTS).read_bytes()[:200])

    refusal(load(managed, "live", live, load_inplace=True), 400, "invalid_adapter")

    assert complete(managed, "live") == expected(llama, "a03")


def test_an_unexpected_version_is_not_replaced(
    llama: World, managed: httpx.Client, live: Path
) -> None:
    fields = {"load_inplace": True, "expected_digest": "0" * 64}

    reply = load(managed, "live", llama.adapters["a09"], **fields)

    refusal(reply, 409, "digest_mismatch")
    assert complete(managed, "live") == expected(llama, "a03")


def test_pinning_shows_in_the_card(managed: httpx.Client) -> None:
    pinned = managed.post("/v1/adapters/a00/pin").raise_for_status().json()
    unpinned = managed.post("/v1/adapters/a00/unpin").raise_for_status().json()

    assert (pinned["lora"]["pinned"], pinned["lora"]["residency"]) == (True, "device")
    assert unpinned["lora"]["pinned"] is False
    refusal(managed.post("/v1/adapters/nobody/pin"), 404, "adapter_not_found")


@pytest.mark.parametrize("name", ["nobody", "A00", " a00", "a00 ", "a0"])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_an_unknown_name_is_404_and_never_the_base(
    route: str, name: str, managed: httpx.Client
) -> None:
    content = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    key = "messages" if "chat" in route else "prompt"

    reply = managed.post(route, json={"model": name, key: content[key]})

    error = refusal(reply, 404, "model_not_found")
    assert error["param"] == "model"
    assert all(repr(known)[1:-1] in error["message"] for known in (BASE_NAME, "a00", "a01"))


def test_the_header_chooses_when_the_body_does_not(llama: World, managed: httpx.Client) -> None:
    def ask(header: str, model: str | None) -> tuple[tuple[int, ...], str]:
        content = {key: value for key, value in body(model).items() if value is not None}
        reply = managed.post("/v1/completions", json=content, headers={"X-Use-LoRA": header})
        tokens = tuple(reply.raise_for_status().json()["choices"][0]["token_ids"])
        return tokens, reply.headers["X-LoRA-Adapter"].split("@")[0]

    assert ask("a01", None) == (expected(llama, "a01"), "a01")
    assert ask("a01", "a01") == (expected(llama, "a01"), "a01")
    assert ask("base", None) == (expected(llama, None), "base")
    assert ask("base", BASE_NAME) == (expected(llama, None), "base")


@pytest.mark.parametrize(("header", "model"), [("a01", "a00"), ("base", "a00"), ("a01", BASE_NAME)])
def test_header_and_model_that_disagree_are_a_conflict(
    header: str, model: str, managed: httpx.Client
) -> None:
    reply = managed.post("/v1/completions", json=body(model), headers={"X-Use-LoRA": header})

    refusal(reply, 400, "adapter_conflict")


def test_an_unknown_header_is_404(managed: httpx.Client) -> None:
    reply = managed.post("/v1/completions", json=body(None), headers={"X-Use-LoRA": "nobody"})

    refusal(reply, 404, "model_not_found")
