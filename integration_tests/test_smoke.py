"""Baselines of real adapters: recorded, checked after an update, and as the gate of an update.

Adapters are PEFT's; what must be served after a gate is PEFT's answer for the version that stayed.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from support.requests import PROMPT, body, complete, expected, load, refusal, streamed, unload
from support.server import BASE_NAME
from support.traffic import LOGPROB_TOLERANCE

from lora_server.cli.bench.trace import read_trace
from lora_server.cli.main import main
from lora_server.smoke.baseline import parse_baseline
from lora_server.smoke.prompts import read_prompts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.fixture_types import StartServer
    from support.server import Server
    from support.worlds import World

MAX_TOKENS = 6
DOCS = Path(__file__).parents[1] / "docs" / "how-to"


@pytest.fixture(scope="module")
def server(llama: World, start_server: StartServer) -> Iterator[Server]:
    flags = ["--adapter-root", str(llama.folder), "--max-loras", "4", "--max-lora-rank", "32"]
    with start_server(llama, *llama.lora_modules("a00"), *flags) as running:
        yield running


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two prompts as token ids, the first of them the one that PEFT is asked elsewhere."""
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": list(PROMPT)}, {"prompt": "the answer to the question"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def smoke(action: str, server: Server, file: Path, *flags: str) -> int:
    return main(["smoke", action, "--base-url", server.url, "--file", str(file), *flags])


def record(server: Server, file: Path, prompts: Path, *names: str) -> dict[str, Any]:
    only = ["--adapter", *names] if names else []
    flags = ["--prompts", str(prompts), "--max-tokens", str(MAX_TOKENS), *only]
    assert smoke("record", server, file, *flags) == 0
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def held(server: Server) -> tuple[float, ...]:
    """Bytes of both tiers, slots and KV blocks, once nothing runs any more."""
    assert server.wait_for(lambda: server.metric("lora_server_adapter_slots_leased") == 0)
    names = (
        "lora_server_adapter_bytes",
        "lora_server_adapter_slots_used",
        "lora_server_kv_blocks_used",
        "lora_server_kv_blocks_kept",
    )
    return tuple(server.metric(name) for name in names)


def test_a_baseline_holds_pefts_tokens_and_logprobs_and_the_digests(
    llama: World, server: Server, prompts: Path, tmp_path: Path
) -> None:
    content = record(server, tmp_path / "b.json", prompts)

    assert list(content["models"]) == [BASE_NAME, "a00"]
    for name, choice in ((BASE_NAME, None), ("a00", "a00")):
        right = llama.oracle.greedy(choice, PROMPT, MAX_TOKENS)
        tokens = content["models"][name]["prompts"][0]["tokens"]
        assert tuple(token["id"] for token in tokens) == right.token_ids
        assert [token["logprob"] for token in tokens] == pytest.approx(
            right.logprobs, abs=LOGPROB_TOLERANCE
        )
    card = server.http.get("/v1/adapters/a00").json()
    assert content["models"]["a00"]["answered_by"] == f"a00@{card['lora']['digest'][:12]}"
    assert content["models"][BASE_NAME]["is_base"] is True


def test_a_check_passes_and_after_an_update_names_adapter_prompt_and_token(
    llama: World,
    server: Server,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "b.json"
    load(server.http, "checked", llama.adapters["a03"]).raise_for_status()
    record(server, file, prompts)
    capsys.readouterr()

    before = smoke("check", server, file, "--json")
    passed = json.loads(capsys.readouterr().out)
    load(server.http, "checked", llama.adapters["a09"], load_inplace=True).raise_for_status()
    after = smoke("check", server, file)
    text = capsys.readouterr().out
    smoke("check", server, file, "--json", "--adapter", "checked")
    moved = json.loads(capsys.readouterr().out)["models"]["checked"]
    unload(server.http, "checked").raise_for_status()
    lost = smoke("check", server, file)

    assert (before, after, lost) == (0, 1, 1)
    assert passed["passed"] is True
    results = [p for model in passed["models"].values() for p in model["prompts"]]
    assert len(results) == 6
    assert {result["verdict"] for result in results} == {"same"}
    old, new = (llama.oracle.greedy(a, PROMPT, MAX_TOKENS) for a in ("a03", "a09"))
    first = next(i for i in range(MAX_TOKENS) if old.token_ids[i] != new.token_ids[i])
    result = moved["prompts"][0]
    assert result["verdict"] == "moved"
    assert result["position"] <= first
    assert result["recorded"]["logprob"] == pytest.approx(
        old.logprobs[result["position"]], abs=LOGPROB_TOLERANCE
    )
    assert result["found"]["logprob"] == pytest.approx(
        new.logprobs[result["position"]], abs=LOGPROB_TOLERANCE
    )
    assert moved["digest_recorded"] != moved["digest_found"][:12]
    assert "FAILED checked: 2 moved of 2 prompts" in text
    assert "prompt 1 [20, 23, 26, 29, 32, 35, 38, 41, ...]" in text
    assert "the digest changed from" in text
    assert f"ok     {BASE_NAME}" in text
    assert "FAILED checked: recorded, but not served" in capsys.readouterr().out


def test_a_gate_keeps_the_old_version_and_frees_the_new_one(
    llama: World, server: Server, prompts: Path, tmp_path: Path
) -> None:
    card = load(server.http, "gated", llama.adapters["a03"]).raise_for_status().json()
    with prompts.open("a") as file:
        # several KV blocks, which the engine keeps for the next prompt that begins so
        file.write(json.dumps({"prompt": list(range(20, 120, 2))}) + "\n")
    gate = record(server, tmp_path / "b.json", prompts, "gated")
    assert complete(server.http, "gated") == expected(llama, "a03")
    before = held(server)
    assert before[-1] > 0

    refused = [
        load(server.http, "gated", llama.adapters["a09"], load_inplace=True, gate=gate)
        for _ in range(3)
    ]

    error = refusal(refused[0], 409, "gate_failed")
    assert {reply.status_code for reply in refused} == {409}
    assert error["details"][0].startswith("prompt 1 [20, 23, ")
    assert "moved at token " in error["details"][0]
    assert card["lora"]["digest"][:12] in error["message"]
    assert server.http.get("/v1/adapters/gated").json()["lora"]["digest"] == card["lora"]["digest"]
    assert complete(server.http, "gated") == expected(llama, "a03")
    assert server.wait_for(lambda: held(server) == before)
    unload(server.http, "gated").raise_for_status()


def test_a_gate_lets_a_version_through_that_answers_as_recorded(
    llama: World, server: Server, prompts: Path, tmp_path: Path
) -> None:
    load(server.http, "next", llama.adapters["a09"]).raise_for_status()
    gate = record(server, tmp_path / "b.json", prompts, "next")
    load(server.http, "next", llama.adapters["a03"], load_inplace=True).raise_for_status()

    reply = load(server.http, "next", llama.adapters["a09"], load_inplace=True, gate=gate)

    answer = reply.raise_for_status().json()
    assert answer["gate"]["passed"] is True
    assert [p["verdict"] for p in answer["gate"]["prompts"]] == ["same", "same"]
    assert answer["gate"]["digest_found"] == answer["lora"]["digest"]
    assert complete(server.http, "next") == expected(llama, "a09")
    unload(server.http, "next").raise_for_status()


def test_expectations_decide_where_answers_are_meant_to_move(
    llama: World, server: Server, prompts: Path, tmp_path: Path
) -> None:
    load(server.http, "meant", llama.adapters["a03"]).raise_for_status()
    gate = record(server, tmp_path / "b.json", prompts, "meant")
    gate["rules"] = {"max_moved_prompts": 2}
    new_text = server.http.post(
        "/v1/completions",
        json={
            "model": BASE_NAME,
            "lora": None,
            "prompt": "the answer to the question",
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        },
    ).json()["choices"][0]["text"]
    prompt = gate["models"]["meant"]["prompts"][1]

    prompt["must_not_contain"] = ["\u0001never\u0001"]
    prompt["must_contain"] = [new_text + "and more"]
    refused = load(server.http, "meant", llama.adapters["a09"], load_inplace=True, gate=gate)
    kept = complete(server.http, "meant")
    prompt["must_contain"] = []
    passed = load(server.http, "meant", llama.adapters["a09"], load_inplace=True, gate=gate)

    assert "the answer lacks" in " ".join(refusal(refused, 409, "gate_failed")["details"])
    assert kept == expected(llama, "a03")
    assert passed.status_code == 200
    assert {p["verdict"] for p in passed.json()["gate"]["prompts"]} == {"moved"}
    assert complete(server.http, "meant") == expected(llama, "a09")
    unload(server.http, "meant").raise_for_status()


def test_streams_and_new_requests_stay_with_the_old_version_while_a_gate_decides(
    llama: World, server: Server, prompts: Path, tmp_path: Path
) -> None:
    card = load(server.http, "busy", llama.adapters["a03"]).raise_for_status().json()
    gate = record(server, tmp_path / "b.json", prompts, "busy")
    num_tokens = 220
    long: dict[str, Any] = {"stream": True, "max_tokens": num_tokens}
    have_begun = threading.Barrier(3)
    is_over = threading.Event()

    def follow(name: str) -> tuple[int, ...]:
        with (
            httpx.Client(base_url=server.url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body(name, **long)) as reply,
        ):
            chunks = streamed(reply)
            tokens = next(chunks)
            have_begun.wait(30)
            return (*tokens, *(token for chunk in chunks for token in chunk))

    def ask_again_and_again() -> set[tuple[str, tuple[int, ...]]]:
        answers = set()
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not is_over.is_set():
                reply = client.post("/v1/completions", json=body("busy"))
                tokens = tuple(reply.raise_for_status().json()["choices"][0]["token_ids"])
                answers.add((reply.headers["X-LoRA-Adapter"], tokens))
        return answers

    with ThreadPoolExecutor(3) as pool:
        streams = {name: pool.submit(follow, name) for name in ("busy", BASE_NAME)}
        have_begun.wait(30)
        asker = pool.submit(ask_again_and_again)
        refused = [
            load(server.http, "busy", llama.adapters["a09"], load_inplace=True, gate=gate)
            for _ in range(5)
        ]
        is_over.set()
        streamed_tokens = {name: stream.result(60) for name, stream in streams.items()}
        answers = asker.result(60)
    unload(server.http, "busy").raise_for_status()

    assert {reply.status_code for reply in refused} == {409}
    assert streamed_tokens["busy"] == expected(llama, "a03", num_tokens)
    assert streamed_tokens[BASE_NAME] == expected(llama, None, num_tokens)
    label = f"busy@{card['lora']['digest'][:12]}"
    assert answers == {(label, expected(llama, "a03"))}


def test_the_servers_own_file_gates_updates_by_default(
    llama: World, server: Server, start_server: StartServer, prompts: Path, tmp_path: Path
) -> None:
    file = tmp_path / "gate.json"
    load(server.http, "own", llama.adapters["a03"]).raise_for_status()
    record(server, file, prompts, "own")
    unload(server.http, "own").raise_for_status()
    flags = ["--adapter-root", str(llama.folder), "--max-lora-rank", "32", "--gate", str(file)]

    with start_server(llama, *flags) as guarded:
        first = load(guarded.http, "own", llama.adapters["a09"])
        passed = load(guarded.http, "own", llama.adapters["a03"], load_inplace=True)
        refused = load(guarded.http, "own", llama.adapters["a09"], load_inplace=True)
        kept = complete(guarded.http, "own")
        forced = load(guarded.http, "own", llama.adapters["a09"], load_inplace=True, gate=False)
        other = load(guarded.http, "other", llama.adapters["a09"], load_inplace=True)

    assert [r.status_code for r in (first, passed, refused, forced, other)] == [
        200,
        200,
        409,
        200,
        200,
    ]
    assert "gate" in passed.json()
    assert "gate" not in other.json()
    assert kept == expected(llama, "a03")


def json_blocks(page: str) -> list[str]:
    """Return the blocks of a page that are JSON."""
    parts = (DOCS / page).read_text().split("```\n")
    return [part for part in parts[1::2] if part.startswith("{")]


def test_the_files_that_the_how_tos_show_are_read_as_they_say(tmp_path: Path) -> None:
    prompts, gate = json_blocks("smoke.md")
    (trace,) = json_blocks("bench.md")
    (tmp_path / "prompts.jsonl").write_text(prompts)
    (tmp_path / "trace.jsonl").write_text(trace)

    (prompt,) = read_prompts(tmp_path / "prompts.jsonl")
    baseline = parse_baseline(json.loads(gate))
    first, second = read_trace(tmp_path / "trace.jsonl")

    assert (prompt.must_contain, prompt.must_not_contain) == (("SELECT",), ("DROP",))
    assert baseline.rules.max_moved_prompts == 8
    assert baseline.models["sql"].prompts[0].tokens is None
    assert (first.adapter, first.output_tokens) == ("sql", 40)
    assert (second.adapter, second.at_s, second.output_tokens) == (None, 0.31, None)
