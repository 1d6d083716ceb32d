"""Many callers manage the same names at once: every call has a clear end, and the table is whole.

The cases carry the numbers of `docs/explanation/cases.md`.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest
from support.requests import body, complete, expected, load, refusal, served, unload
from support.server import BASE_NAME, fail_to_start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.fixture_types import StartServer
    from support.server import Server
    from support.worlds import World

FLAGS = ("--max-loras", "3", "--max-cpu-loras", "4", "--max-lora-rank", "32")


@pytest.fixture(scope="module")
def server(llama: World, start_server: StartServer) -> Iterator[Server]:
    with start_server(llama, *FLAGS, "--adapter-root", str(llama.folder)) as running:
        yield running


ALLOWED = {
    "load": {(200, ""), (400, "adapter_already_loaded")},
    "unload": {(200, ""), (404, "adapter_not_found")},
    "models": {(200, "")},
    "pin": {(200, ""), (404, "adapter_not_found")},
    "unpin": {(200, ""), (404, "adapter_not_found")},
    "completions": {(200, ""), (404, "model_not_found")},
}
"""What may come back for each kind of call on one name that comes and goes."""


def send(client: httpx.Client, kind: str, path: Path) -> httpx.Response:
    """Send one call about the name `a`."""
    match kind:
        case "load":
            return load(client, "a", path)
        case "unload":
            return unload(client, "a")
        case "models":
            return client.get("/v1/models")
        case "completions":
            return client.post("/v1/completions", json=body("a"))
        case _:
            return client.post(f"/v1/adapters/a/{kind}")


def problem_of(kind: str, reply: httpx.Response, right: set[tuple[int, ...]]) -> str | None:
    """Say what is wrong with a reply."""
    code = "" if reply.is_success else reply.json()["error"]["code"]
    if (reply.status_code, code) not in ALLOWED[kind]:
        return f"{kind}: {reply.status_code} {reply.text}"
    if kind == "models":
        names = [card["id"] for card in reply.json()["data"]]
        return None if names in ([BASE_NAME], [BASE_NAME, "a"]) else f"models: {names}"
    if kind == "completions" and reply.is_success:
        tokens = tuple(reply.json()["choices"][0]["token_ids"])
        return None if tokens in right else f"completions: {tokens}"
    return None


def test_c44_loads_unloads_and_requests_of_one_name_at_once_end_clearly(
    llama: World, server: Server
) -> None:
    sources = ("a03", "a09")
    right = {expected(llama, source) for source in sources}

    def work(seed: int) -> list[str]:
        chance = random.Random(seed)
        problems = []
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for _ in range(6):
                kind = chance.choice(list(ALLOWED))
                reply = send(client, kind, llama.adapters[chance.choice(sources)])
                problems.append(problem_of(kind, reply, right))
        return [problem for problem in problems if problem is not None]

    with ThreadPoolExecutor(50) as pool:
        problems = list(pool.map(work, range(50)))

    assert [problem for some in problems for problem in some] == []
    unload(server.http, "a")
    assert served(server.http) == [BASE_NAME]
    assert server.wait_for(lambda: server.metric("lora_server_adapter_bytes") == 0)
    load(server.http, "a", llama.adapters["a03"]).raise_for_status()
    assert complete(server.http, "a") == expected(llama, "a03")
    unload(server.http, "a").raise_for_status()


def test_c45_of_many_that_load_one_name_from_different_paths_exactly_one_wins(
    llama: World, server: Server
) -> None:
    sources = ("a03", "a05", "a07", "a09")

    def take(source: str) -> httpx.Response:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            return load(client, "one", llama.adapters[source])

    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(take, sources * 3))

    won = [reply for reply in replies if reply.status_code == 200]
    assert len(won) == 1
    for reply in replies:
        if reply is not won[0]:
            refusal(reply, 400, "adapter_already_loaded")
    assert served(server.http) == [BASE_NAME, "one"]
    winner = won[0].json()["root"].rpartition("/")[2]
    assert complete(server.http, "one") == expected(llama, winner)
    unload(server.http, "one").raise_for_status()


def test_c45_more_than_one_worker_is_refused(llama: World, tmp_path: Path) -> None:
    arguments = ["serve", str(llama.base), "--port", "0", "--workers", "2"]

    status, said = fail_to_start(arguments, tmp_path / "log")

    assert status not in (0, None)
    assert "--workers" in said


def test_c51_one_folder_under_two_names_takes_one_place_and_one_slot(
    llama: World, server: Server
) -> None:
    cards = [
        load(server.http, name, llama.adapters["a03"]).raise_for_status().json() for name in "ab"
    ]
    one_bytes = cards[0]["lora"]["bytes"]
    answers = [complete(server.http, name) for name in "ab"]
    host_bytes = server.metric("lora_server_adapter_bytes", tier="host")
    slots = server.metric("lora_server_adapter_slots_used")

    again = load(server.http, "a", llama.adapters["a03"])
    other = load(server.http, "a", llama.adapters["a09"])
    unchanged = complete(server.http, "a")
    replaced = load(server.http, "a", llama.adapters["a09"], load_inplace=True).json()

    assert cards[0]["lora"]["digest"] == cards[1]["lora"]["digest"]
    assert answers == [expected(llama, "a03")] * 2
    assert (host_bytes, slots) == (one_bytes, 1)
    for reply in (again, other):
        refusal(reply, 400, "adapter_already_loaded")
    assert unchanged == expected(llama, "a03")
    assert replaced["lora"]["digest"] != cards[0]["lora"]["digest"]
    assert complete(server.http, "a") == expected(llama, "a09")
    assert complete(server.http, "b") == expected(llama, "a03")
    for name in "ab":
        unload(server.http, name).raise_for_status()


def test_a_pin_waits_for_a_slot_that_running_requests_hold(llama: World, server: Server) -> None:
    """As requests do, for no longer than the bound; nobody's answer changes."""
    names = ("p0", "p1", "p2", "p3")
    sources = dict(zip(names, ("a03", "a05", "a07", "a09"), strict=True))
    for name, source in sources.items():
        load(server.http, name, llama.adapters[source]).raise_for_status()

    with ThreadPoolExecutor(4) as pool:
        running = [
            pool.submit(httpx.post, f"{server.url}/v1/completions", json=body(name, max_tokens=160))
            for name in names[:3]
        ]
        assert server.wait_for(lambda: server.metric("lora_server_adapter_slots_leased") == 3)
        card = server.http.post("/v1/adapters/p3/pin").raise_for_status().json()
        replies = [each.result(60) for each in running]

    assert (card["lora"]["pinned"], card["lora"]["residency"]) == (True, "device")
    for name, reply in zip(names, replies, strict=False):
        tokens = tuple(reply.raise_for_status().json()["choices"][0]["token_ids"])
        assert tokens == expected(llama, sources[name], 160)
    for name in names:
        unload(server.http, name).raise_for_status()
    assert server.metric("lora_server_adapter_slots_pinned") == 0


def test_c10_a_pin_may_not_take_the_last_slot_unless_allowed_and_then_others_are_refused_at_once(
    llama: World, start_server: StartServer
) -> None:
    modules = llama.lora_modules("a03", "a09")
    one_slot = ["--max-loras", "1", "--max-lora-rank", "32"]

    with start_server(llama, *modules, *one_slot) as strict:
        kept = refusal(strict.http.post("/v1/adapters/a03/pin"), 400, "invalid_request")
        answers = [complete(strict.http, name) for name in ("a03", "a09")]
    with start_server(llama, *modules, *one_slot, "--allow-pin-all") as loose:
        loose.http.post("/v1/adapters/a03/pin").raise_for_status()
        refused = refusal(
            loose.http.post("/v1/completions", json=body("a09")), 400, "invalid_request"
        )
        pinned = complete(loose.http, "a03")
        loose.http.post("/v1/adapters/a03/unpin").raise_for_status()
        freed = complete(loose.http, "a09")

    assert "--allow-pin-all" in kept["message"]
    assert answers == [expected(llama, name) for name in ("a03", "a09")]
    assert all(name in refused["message"] for name in ("a03", "a09"))
    assert (pinned, freed) == (expected(llama, "a03"), expected(llama, "a09"))
