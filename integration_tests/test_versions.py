"""A name may stand for one version after another; no answer ever mixes two of them.

The cases carry the numbers of `docs/explanation/cases.md`.
"""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from support.adapters import CONFIG, WEIGHTS
from support.requests import (
    NUM_TOKENS,
    PROMPT,
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
from support.traffic import LOGPROB_TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.fixture_types import StartServer
    from support.oracle import Choice
    from support.server import Server
    from support.worlds import World

LONG_PROMPT = tuple(range(20, 120, 2))
"""More than three KV blocks."""


@pytest.fixture(scope="module")
def small(llama: World, start_server: StartServer) -> Iterator[Server]:
    """Two slots, two places in host memory, and everything may be loaded."""
    flags = ["--max-loras", "2", "--max-cpu-loras", "2", "--max-lora-rank", "32"]
    with start_server(llama, *flags, "--adapter-root", str(llama.folder)) as server:
        yield server


@contextmanager
def copied(llama: World, source: str, name: str) -> Iterator[Path]:
    """A folder with a copy of an adapter that tests may overwrite."""
    folder = llama.folder / name
    shutil.copytree(llama.adapters[source], folder)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def overwrite(folder: Path, source: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        shutil.copyfile(source / name, folder / name)


def answer(client: httpx.Client, model: str, **fields: Any) -> tuple[tuple[int, ...], str]:
    """Ask with the long prompt; return the tokens and what the header says answered."""
    reply = client.post("/v1/completions", json=body(model, prompt=list(LONG_PROMPT), **fields))
    assert reply.status_code == 200, reply.text
    tokens = tuple(reply.json()["choices"][0]["token_ids"])
    return tokens, reply.headers["X-LoRA-Adapter"]


def right(llama: World, choice: Choice) -> tuple[int, ...]:
    return llama.oracle.greedy(choice, LONG_PROMPT, NUM_TOKENS).token_ids


def push_out(llama: World, client: httpx.Client) -> None:
    """Use two other adapters, which fill both tiers."""
    for name in ("a01", "a02"):
        if name not in served(client):
            load(client, name, llama.adapters[name]).raise_for_status()
        complete(client, name)


def test_c34_a_replaced_adapter_answers_like_a_fresh_server_under_a_new_digest(
    llama: World, small: Server
) -> None:
    with copied(llama, "a03", "c34") as folder:
        load(small.http, "c34", folder).raise_for_status()
        before = small.metric("vllm:prefix_cache_hits_total")
        first, again = answer(small.http, "c34"), answer(small.http, "c34")
        hits = small.metric("vllm:prefix_cache_hits_total") - before
        overwrite(folder, llama.adapters["a09"])
        load(small.http, "c34", folder, load_inplace=True).raise_for_status()
        same_path = answer(small.http, "c34")
        load(small.http, "c34", llama.adapters["a07"], load_inplace=True).raise_for_status()
        new_path = answer(small.http, "c34")
        unload(small.http, "c34").raise_for_status()

    assert hits >= 32
    assert first == again
    assert [tokens for tokens, _ in (first, same_path, new_path)] == [
        right(llama, name) for name in ("a03", "a09", "a07")
    ]
    assert len({label for _, label in (first, same_path, new_path)}) == 3


def test_c34_bytes_that_changed_since_are_never_served_under_the_old_digest(
    llama: World, small: Server
) -> None:
    with copied(llama, "a03", "changed") as folder:
        card = load(small.http, "changed", folder).raise_for_status().json()
        push_out(llama, small.http)
        overwrite(folder, llama.adapters["a09"])

        refused = small.http.post("/v1/completions", json=body("changed"))
        load(small.http, "changed", folder, load_inplace=True).raise_for_status()
        tokens, label = answer(small.http, "changed")
        unload(small.http, "changed").raise_for_status()

    message = refused.json()["error"]["message"]
    assert refused.status_code == 500
    assert "changed" in message
    assert card["lora"]["digest"][:12] in message
    assert tokens == right(llama, "a09")
    assert card["lora"]["digest"][:12] not in label


def test_c35_two_adapters_in_turn_never_share_what_is_kept_of_a_prompt(
    llama: World, small: Server
) -> None:
    for name in ("a01", "a02"):
        if name not in served(small.http):
            load(small.http, name, llama.adapters[name]).raise_for_status()
    before = small.metric("vllm:prefix_cache_hits_total")

    turns = [answer(small.http, name)[0] for name in ("a01", "a02", BASE_NAME) * 3]

    assert turns == [right(llama, choice) for choice in ("a01", "a02", None)] * 3
    assert small.metric("vllm:prefix_cache_hits_total") - before >= 6 * 32


def test_c36_after_a_replace_nothing_is_answered_from_before_it(
    llama: World, small: Server
) -> None:
    """Tokens of completions and chats, and log-probabilities of prompt and answer."""

    def ask_everything() -> tuple[tuple[int, ...], tuple[int, ...], list[float]]:
        scored = small.http.post(
            "/v1/completions", json=body("c36", echo=True, logprobs=0)
        ).raise_for_status()
        content = {k: v for k, v in body("c36").items() if k != "prompt"}
        chat = small.http.post(
            "/v1/chat/completions",
            json={**content, "messages": [{"role": "user", "content": "hi"}]},
        ).raise_for_status()
        logprobs = scored.json()["choices"][0]["logprobs"]["token_logprobs"][1:]
        return (
            complete(small.http, "c36"),
            tuple(chat.json()["choices"][0]["token_ids"]),
            logprobs,
        )

    load(small.http, "c36", llama.adapters["a03"]).raise_for_status()
    old = ask_everything()
    load(small.http, "c36", llama.adapters["a09"], load_inplace=True).raise_for_status()
    new = ask_everything()
    load(small.http, "c36", llama.adapters["a03"], load_inplace=True).raise_for_status()
    back = ask_everything()
    unload(small.http, "c36").raise_for_status()

    for (tokens, _, logprobs), name in ((old, "a03"), (new, "a09")):
        assert tokens == expected(llama, name)
        wanted = llama.oracle.greedy(name, PROMPT, NUM_TOKENS).logprobs
        wanted = (*llama.oracle.prompt_logprobs(name, PROMPT), *wanted)
        assert logprobs == pytest.approx(wanted, abs=LOGPROB_TOLERANCE)
    assert old[1] != new[1]
    assert back[:2] == old[:2]


def test_c37_another_scale_on_an_active_adapter_is_applied(llama: World, small: Server) -> None:
    load(small.http, "c37", llama.adapters["a09"]).raise_for_status()
    scales = (1.0, 0.5, 1.0, -0.25)

    answers = [
        answer(small.http, BASE_NAME, lora=[{"name": "c37", "scale": scale}])[0] for scale in scales
    ]
    unload(small.http, "c37").raise_for_status()

    assert answers == [right(llama, (("a09", scale),)) for scale in scales]
    assert len(set(answers)) == 3


def test_c38_replacing_twenty_times_under_load_refuses_nobody_and_mixes_nothing(
    llama: World, start_server: StartServer
) -> None:
    flags = ["--max-loras", "4", "--max-lora-rank", "32", "--adapter-root", str(llama.folder)]
    sources = ("a03", "a09")
    right_by_digest: dict[str, tuple[int, ...]] = {}
    problems: list[str] = []
    is_over = threading.Event()

    def loop(url: str) -> int:
        count = 0
        with httpx.Client(base_url=url, timeout=60) as client:
            while not is_over.is_set():
                reply = client.post("/v1/completions", json=body("a"))
                label = reply.headers.get("X-LoRA-Adapter", "")
                tokens = tuple(reply.json()["choices"][0]["token_ids"]) if reply.is_success else ()
                if right_by_digest.get(label.removeprefix("a@")) != tokens:
                    problems.append(f"{reply.status_code} {label} {reply.text}")
                count += 1
        return count

    with (
        start_server(llama, *flags) as server,
        copied(llama, "a05", "c38-broken") as broken,
        ThreadPoolExecutor(10) as pool,
    ):
        (broken / WEIGHTS).write_bytes(b"not a weight file")
        for source in sources:
            card = load(server.http, "a", llama.adapters[source], load_inplace=True).json()
            right_by_digest[card["lora"]["digest"][:12]] = expected(llama, source)
        loops = [pool.submit(loop, server.url) for _ in range(10)]
        stream_body = body("a", stream=True, max_tokens=160)
        with server.http.stream("POST", "/v1/completions", json=stream_body) as stream:
            chunks = streamed(stream)
            tokens = next(chunks)
            statuses = [
                load(server.http, "a", llama.adapters[sources[i % 2]], load_inplace=True)
                for i in range(20)
            ]
            refused = load(server.http, "a", broken, load_inplace=True)
            kept = complete(server.http, "a")
            for chunk in chunks:
                tokens += chunk
        is_over.set()
        counts = [one.result() for one in loops]

    assert problems == []
    assert all(counts)
    assert {reply.status_code for reply in statuses} == {200}
    refusal(refused, 400, "invalid_adapter")
    assert kept == expected(llama, "a09")
    assert tuple(tokens) == expected(llama, "a09", 160)


def test_c43_a_new_version_at_full_capacity_waits_for_a_slot_and_evicts_no_live_one(
    llama: World, small: Server
) -> None:
    for name in ("v1", "v2"):
        load(small.http, name, llama.adapters["a03" if name == "v1" else "a09"])
    long: dict[str, Any] = {"stream": True, "max_tokens": 150}

    with (
        httpx.Client(base_url=small.url, timeout=60) as one,
        httpx.Client(base_url=small.url, timeout=60) as two,
        one.stream("POST", "/v1/completions", json=body("v1", **long)) as first,
        two.stream("POST", "/v1/completions", json=body("v2", **long)) as second,
    ):
        chunks = streamed(first), streamed(second)
        tokens = [next(each) for each in chunks]
        card = load(small.http, "v3", llama.adapters["a07"]).raise_for_status().json()
        unload(small.http, "v1").raise_for_status()
        with ThreadPoolExecutor(1) as pool:
            third = pool.submit(complete, small.http, "v3")
            for so_far, each in zip(tokens, chunks, strict=True):
                so_far.extend(token_id for chunk in each for token_id in chunk)
            answered = third.result(60)

    assert card["lora"]["residency"] in {"host", "disk"}
    assert [tuple(each) for each in tokens] == [
        expected(llama, name, 150) for name in ("a03", "a09")
    ]
    assert answered == expected(llama, "a07")
    for name in ("v2", "v3"):
        unload(small.http, name).raise_for_status()


def test_c43_a_host_tier_full_of_pins_refuses_one_more_and_names_them(
    llama: World, start_server: StartServer
) -> None:
    flags = ["--max-loras", "2", "--max-cpu-loras", "2", "--max-lora-rank", "32"]
    flags += ["--allow-pin-all", "--adapter-root", str(llama.folder)]
    modules = llama.lora_modules("a03", "a09")

    with start_server(llama, *modules, *flags) as server:
        for name in ("a03", "a09"):
            server.http.post(f"/v1/adapters/{name}/pin").raise_for_status()
        error = refusal(load(server.http, "more", llama.adapters["a07"]), 400, "invalid_request")
        names = served(server.http)

    assert "a03" in error["message"]
    assert "a09" in error["message"]
    assert names == [BASE_NAME, "a03", "a09"]


def test_c46_an_adapter_that_cannot_be_read_again_ends_only_its_own_requests(
    llama: World, small: Server
) -> None:
    with copied(llama, "a03", "c46") as folder:
        load(small.http, "c46", folder).raise_for_status()
        push_out(llama, small.http)
        weights = (folder / WEIGHTS).read_bytes()
        for kind in ("cut", "gone"):
            if kind == "cut":
                (folder / WEIGHTS).write_bytes(weights[: len(weights) // 2])
            else:
                shutil.rmtree(folder)
            with ThreadPoolExecutor(3) as pool:
                asked = [
                    pool.submit(httpx.post, f"{small.url}/v1/completions", json=body(name))
                    for name in ("c46", BASE_NAME, "a01")
                ]
                lost, base, other = (each.result(60) for each in asked)
            assert lost.status_code == 500, kind
            assert "c46" in lost.json()["error"]["message"]
            for reply, choice in ((base, None), (other, "a01")):
                tokens = tuple(reply.raise_for_status().json()["choices"][0]["token_ids"])
                assert tokens == expected(llama, choice)
        card = small.http.get("/v1/adapters/c46").json()
        shutil.copytree(llama.adapters["a03"], folder)

        assert card["lora"]["residency"] == "disk"
        assert complete(small.http, "c46") == expected(llama, "a03")
        unload(small.http, "c46").raise_for_status()
    assert "outside a forward pass" not in small.log.read_text()


def test_s11_an_adapter_answers_the_same_before_and_after_it_went_to_the_disk_and_back(
    llama: World, small: Server
) -> None:
    load(small.http, "back", llama.adapters["a05"]).raise_for_status()
    first = complete(small.http, "back")

    push_out(llama, small.http)
    residency = small.http.get("/v1/adapters/back").json()["lora"]["residency"]

    assert residency == "disk"
    assert complete(small.http, "back") == first == expected(llama, "a05")
    unload(small.http, "back").raise_for_status()


def test_a_stale_compare_is_refused_and_a_fresh_one_replaces(llama: World, small: Server) -> None:
    first = load(small.http, "compared", llama.adapters["a03"]).json()["lora"]["digest"]
    replace = {"load_inplace": True, "expected_digest": first}

    second = load(small.http, "compared", llama.adapters["a09"], **replace)
    stale = load(small.http, "compared", llama.adapters["a07"], **replace)

    assert second.status_code == 200
    assert second.json()["lora"]["digest"][:12] in refusal(stale, 409, "digest_mismatch")["message"]
    assert complete(small.http, "compared") == expected(llama, "a09")
    unload(small.http, "compared").raise_for_status()
    refusal(load(small.http, "compared", llama.adapters["a09"], **replace), 409, "digest_mismatch")
